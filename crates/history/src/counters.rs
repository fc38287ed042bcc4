//! Counters: every increment counts once, in an order that respects real time.
//!
//! A store answers an increment with the new value, so the order is known: increment number n made the value n. The
//! rest needs no search. Two increments never get the same answer; an operation that ended before another began saw a
//! smaller value; and a value that no client received was made by an increment with an unknown outcome, which must
//! have been invoked before any client saw that value or a greater one.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The operation on a counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ask {
    Increment,
    Read,
}

/// The outcome of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Unknown,
    Failed,
    Told { at: u64, value: u64 },
}

#[derive(Clone, Debug)]
struct Call {
    counter: String,
    client: u64,
    ask: Ask,
    invoked: u64,
    end: End,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ask = match self.ask {
            Ask::Increment => "increments",
            Ask::Read => "reads",
        };
        write!(f, "client {} {ask} at {}", self.client, self.invoked)?;
        match self.end {
            End::Told { at, value } => write!(f, " and hears {value} at {at}"),
            End::Unknown => f.write_str(" and hears nothing"),
            End::Failed => f.write_str(" in vain"),
        }
    }
}

/// A violated guarantee.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CounterViolation {
    /// The counter.
    pub counter: String,
    /// The violation.
    pub what: String,
}

impl fmt::Display for CounterViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "counter {}: {}", self.counter, self.what)
    }
}

impl std::error::Error for CounterViolation {}

/// The id of a call in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CallId(usize);

/// Records the operations of clients on counters that start at zero. Usable from many threads; time is a number that
/// advances at every call.
#[derive(Default)]
pub struct Counters {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    now: u64,
    calls: Vec<Call>,
}

impl Counters {
    /// An empty recorder.
    pub fn new() -> Self {
        Self::default()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn invoke(&self, client: u64, counter: &str, ask: Ask) -> CallId {
        let mut inner = self.inner();
        inner.now += 1;
        let invoked = inner.now;
        inner.calls.push(Call { counter: counter.to_owned(), client, ask, invoked, end: End::Unknown });
        CallId(inner.calls.len() - 1)
    }

    /// A client is about to increment.
    pub fn increment(&self, client: u64, counter: &str) -> CallId {
        self.invoke(client, counter, Ask::Increment)
    }

    /// A client is about to read.
    pub fn read(&self, client: u64, counter: &str) -> CallId {
        self.invoke(client, counter, Ask::Read)
    }

    /// The client received this value.
    pub fn told(&self, id: CallId, value: u64) {
        let mut inner = self.inner();
        inner.now += 1;
        let at = inner.now;
        inner.calls[id.0].end = End::Told { at, value };
    }

    /// It is certain that it did not happen and never will.
    pub fn failed(&self, id: CallId) {
        self.inner().calls[id.0].end = End::Failed;
    }

    /// The number of acknowledged increments.
    pub fn acknowledged(&self) -> usize {
        let told = |call: &&Call| call.ask == Ask::Increment && matches!(call.end, End::Told { .. });
        self.inner().calls.iter().filter(told).count()
    }

    /// Checks whether correct counters can have given all these answers.
    pub fn check(&self) -> Result<(), CounterViolation> {
        let inner = self.inner();
        let mut by_counter: BTreeMap<&str, Vec<&Call>> = BTreeMap::new();
        for call in &inner.calls {
            by_counter.entry(&call.counter).or_default().push(call);
        }
        for (counter, calls) in by_counter {
            let broken = |what| CounterViolation { counter: counter.to_owned(), what };
            check_one(&calls).map_err(broken)?;
        }
        Ok(())
    }
}

fn check_one(calls: &[&Call]) -> Result<(), String> {
    let mut makers: BTreeMap<u64, &Call> = BTreeMap::new();
    for call in calls.iter().filter(|call| call.ask == Ask::Increment) {
        let End::Told { value, .. } = call.end else { continue };
        if let Some(other) = makers.insert(value, call) {
            return Err(format!("two increments made {value}\n  {other}\n  {call}"));
        }
    }
    check_time(calls)?;
    check_holes(calls, &makers)
}

/// No client receives less than what was known before its call; an increment returns more.
fn check_time(calls: &[&Call]) -> Result<(), String> {
    // (time, whether it is an answer, the call), in time order.
    let mut moments: Vec<(u64, bool, &Call, u64)> = Vec::new();
    for call in calls {
        if let End::Told { at, value } = call.end {
            moments.push((call.invoked, false, call, value));
            moments.push((at, true, call, value));
        }
    }
    moments.sort_by_key(|(at, ..)| *at);
    let mut known: Option<(u64, &Call)> = None;
    for (_, is_answer, call, value) in moments {
        let Some((before, of)) = known else {
            if is_answer {
                known = Some((value, call));
            }
            continue;
        };
        let least = if call.ask == Ask::Increment { before + 1 } else { before };
        if !is_answer && value < least {
            return Err(format!("what was known is lost\n  {of}\n  {call}"));
        }
        if is_answer && value > before {
            known = Some((value, call));
        }
    }
    Ok(())
}

/// Every observed value was made by an increment that was invoked in time.
fn check_holes(calls: &[&Call], makers: &BTreeMap<u64, &Call>) -> Result<(), String> {
    let mut seen: Vec<(u64, u64, &Call)> = Vec::new();
    for call in calls {
        if let End::Told { at, value } = call.end {
            seen.push((value, at, call));
        }
    }
    seen.sort_by_key(|(value, at, _)| (*value, *at));
    let unknown = |call: &&&Call| call.ask == Ask::Increment && call.end == End::Unknown;
    let mut asked: Vec<u64> = calls.iter().filter(unknown).map(|call| call.invoked).collect();
    asked.sort_unstable();
    let most = seen.last().map_or(0, |(value, ..)| *value);
    // From the greatest value down: the earliest time at which a client saw that much.
    let mut holes = Vec::new();
    let mut first_seen: Option<(u64, &Call)> = None;
    for value in (1..=most).rev() {
        while let Some((_, at, call)) = seen.pop_if(|(seen, ..)| *seen >= value) {
            if first_seen.is_none_or(|(first, _)| at < first) {
                first_seen = Some((at, call));
            }
        }
        if !makers.contains_key(&value) {
            holes.extend(first_seen.map(|(at, call)| (value, at, call)));
        }
    }
    // The k-th value without an increment takes the k-th increment with an unknown outcome.
    for (number, (value, at, call)) in holes.into_iter().rev().enumerate() {
        if asked.get(number).is_none_or(|asked| *asked >= at) {
            return Err(format!("no increment can have made {value}\n  {call}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A history in words: `i1` client 1 increments, `r1` reads, `=1:5` client 1 receives 5, `x1` certainly fails.
    fn check(script: &str) -> Result<(), String> {
        let counters = Counters::new();
        let mut open = BTreeMap::new();
        for word in script.split_whitespace() {
            let (kind, rest) = word.split_at(1);
            match kind {
                "i" => drop(open.insert(rest.to_owned(), counters.increment(1, "c"))),
                "r" => drop(open.insert(rest.to_owned(), counters.read(1, "c"))),
                "x" => counters.failed(open[rest]),
                _ => {
                    let (client, value) = rest.split_once(':').unwrap();
                    counters.told(open[client], value.parse().unwrap());
                }
            }
        }
        counters.check().map_err(|error| error.what)
    }

    #[test]
    fn valid_counter_histories_are_accepted() {
        for fine in [
            "",
            "i1 =1:1 i2 =2:2 r3 =3:2",
            "r1 =1:0 i2 i3 =3:1 =2:2",
            "i1 i2 =2:2 =1:1",
            "i1 i2 =2:2 r3 =3:2", // the first one's answer was lost
            "i1 i2 =2:1 r3 =3:1", // or it never happened
            "i1 r2 i3 =2:1 =3:2", // a read saw it
            "i1 x1 i2 =2:1 r3 =3:1",
            "i1 i2 i3 =3:3 r4 =4:3",
        ] {
            assert_eq!(check(fine), Ok(()), "{fine}");
        }
    }

    #[test]
    fn invalid_counter_histories_are_rejected() {
        for (wrong, why) in [
            ("i1 =1:1 i2 =2:1", "two increments made 1"),
            ("i1 =1:1 r2 =2:0", "what was known is lost"),
            ("i1 =1:2 i2 =2:1", "what was known is lost"),
            ("r1 =1:1", "no increment can have made 1"),
            ("i1 x1 r2 =2:1", "no increment can have made 1"),
            ("i1 =1:2", "no increment can have made 1"),
            // The increment with an unknown outcome came too late for the observed value.
            ("i1 =1:2 i2", "no increment can have made 1"),
            ("i1 i2 =2:3", "no increment can have made 2"),
        ] {
            let said = check(wrong).unwrap_err();
            assert!(said.starts_with(why), "{wrong}: {said}");
        }
    }
}
