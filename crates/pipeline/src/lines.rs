//! The built-in text that a load client sends if no file is given; it is always the same.
//!
//! Invariants: [`COUNT`] distinct lines, [`BYTES`] bytes in total without line ends, the same on every machine and in
//! every version, so that verdicts of different runs are comparable.

use std::fmt::Write as _;

/// Number of lines of the built-in text.
pub const COUNT: usize = 4_422;
/// Total bytes of all lines.
pub const BYTES: usize = 283_052;

const SUBJECTS: [&str; 16] = [
    "the ferryman",
    "a tall clerk",
    "the night nurse",
    "an old cartographer",
    "the youngest sister",
    "a quiet porter",
    "the lamplighter",
    "a retired judge",
    "the gardener",
    "a travelling tailor",
    "the station master",
    "a curious child",
    "the baker",
    "a patient angler",
    "the postmistress",
    "a lost drummer",
];
const VERBS: [&str; 16] = [
    "counted",
    "remembered",
    "carried",
    "described",
    "followed",
    "repaired",
    "hid",
    "borrowed",
    "painted",
    "questioned",
    "returned",
    "guarded",
    "measured",
    "forgot",
    "announced",
    "watched",
];
const OBJECTS: [&str; 16] = [
    "every lantern",
    "the missing ledger",
    "seven brass keys",
    "a letter from the coast",
    "the winter timetable",
    "two silver bells",
    "the broken compass",
    "a map of the marshes",
    "the last of the apples",
    "an unfinished song",
    "the harbour clock",
    "a basket of rope",
    "the red umbrella",
    "three sealed jars",
    "the names on the wall",
    "a borrowed coat",
];

/// All lines, in order.
pub fn all() -> Vec<String> {
    let mut left = BYTES;
    let mut lines = Vec::with_capacity(COUNT);
    for at in 0..COUNT {
        let mut line = sentence(at);
        // The remaining bytes are distributed evenly, so that the total is exact; line lengths still vary.
        let share = left / (COUNT - at);
        let wanted = if at + 1 == COUNT { left } else { share + at % 17 - 8 };
        let mut filler = at;
        while line.len() < wanted {
            line.push(if line.ends_with(' ') {
                letter(filler)
            } else if filler % 6 == 0 {
                ' '
            } else {
                letter(filler)
            });
            filler += 1;
        }
        line.truncate(wanted);
        left -= line.len();
        lines.push(line);
    }
    lines
}

/// A sentence that starts with its line number, so that all lines are distinct.
fn sentence(at: usize) -> String {
    let mut line = String::new();
    let word = |list: &[&'static str; 16], by: usize| list[(at / by) % 16];
    // Writing to a string cannot fail.
    let _ = write!(line, "{at:04} {} {} {}", word(&SUBJECTS, 1), word(&VERBS, 5), word(&OBJECTS, 3));
    line
}

fn letter(at: usize) -> char {
    char::from(b'a' + (at * 7 % 26) as u8)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn built_in_text_has_the_reference_size() {
        let lines = all();
        assert_eq!(lines.len(), COUNT);
        assert_eq!(lines.iter().map(String::len).sum::<usize>(), BYTES);
        assert_eq!(lines.iter().collect::<HashSet<_>>().len(), COUNT);
        assert!(lines.iter().all(|line| line.len() >= 40 && line.len() <= 90), "of a line's length");
    }
}
