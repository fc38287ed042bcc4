//! What a command prints: one value, as an aligned table for people or as JSON for programs.
//!
//! Invariants: data goes to stdout and nothing else does; the same struct feeds both forms; JSON never
//! omits a key. A table is never wrapped or cut, so that a pipe into `awk` sees what a person sees.

use std::borrow::Cow;
use std::io::{self, BufRead as _, IsTerminal as _, Write as _};

use clap::ValueEnum;
use comfy_table::{Attribute, Cell, CellAlignment, ContentArrangement, Table, presets};
use moim_node::styled;
use serde::Serialize;

use crate::exit::{Failure, Outcome};

pub(crate) use moim_node::counted;

/// The format of the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Aligned columns.
    #[default]
    Table,
    /// One JSON document; one object per line from commands that stream.
    Json,
}

/// A value a command can print.
pub(crate) trait Report: Serialize {
    /// The value as tables, for people.
    fn sections(&self) -> Vec<Section>;
}

/// One table.
#[derive(Clone, Debug, Default)]
pub(crate) struct Section {
    /// Column names; one that starts with `>` is a column of numbers and aligns to the right.
    columns: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Section {
    /// A table with these columns. A name that starts with `>` aligns to the right.
    pub(crate) fn new(columns: &[&'static str]) -> Self {
        Self { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// A table of names and values, without a header.
    pub(crate) fn pairs<const N: usize>(pairs: [(&str, String); N]) -> Self {
        let rows = pairs.into_iter().map(|(name, value)| vec![name.to_owned(), value]).collect();
        Self { columns: Vec::new(), rows }
    }

    /// Adds a line.
    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// The table as text for a file or a log.
    pub(crate) fn text(&self) -> String {
        self.render(false)
    }

    fn render(&self, bold: bool) -> String {
        let mut table = Table::new();
        table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        if bold {
            table.enforce_styling();
        } else {
            table.force_no_tty();
        }
        if !self.columns.is_empty() {
            let header = self.columns.iter().map(|name| {
                let cell = Cell::new(name.trim_start_matches('>'));
                if bold { cell.add_attribute(Attribute::Bold) } else { cell }
            });
            table.set_header(header.collect::<Vec<_>>());
        }
        for row in &self.rows {
            table.add_row(row.iter().map(|cell| escape_control(cell)));
        }
        for (index, column) in table.column_iter_mut().enumerate() {
            column.set_padding((0, 2));
            if self.columns.get(index).is_some_and(|name| name.starts_with('>')) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table.trim_fmt()
    }
}

/// Where a command's data goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    /// The format that `-o` selects.
    pub(crate) format: Format,
}

impl Output {
    /// Prints a complete report.
    pub(crate) fn print(&self, report: &impl Report) -> Outcome {
        let mut out = io::stdout().lock();
        match self.format {
            Format::Json => {
                serde_json::to_writer_pretty(&mut out, report)?;
                writeln!(out)?;
            }
            Format::Table => {
                let bold = styled(out.is_terminal());
                for (index, section) in report.sections().iter().enumerate() {
                    let gap = if index == 0 { "" } else { "\n" };
                    writeln!(out, "{gap}{}", section.render(bold))?;
                }
            }
        }
        out.flush()?;
        Ok(())
    }
}

/// Text with its control characters escaped. Clients choose the names of groups and members: an escape code in a name must
/// not reach the terminal, and a line break must not forge a row.
pub(crate) fn escape_control(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return Cow::Borrowed(text);
    }
    let spell = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    Cow::Owned(text.chars().map(spell).collect())
}

/// Prints a note on stderr, so that a pipe on stdout gets only data.
pub(crate) fn note(text: impl std::fmt::Display) {
    eprintln!("{text}");
}

/// Explains a table without rows, only at a terminal; a script sees that it is empty.
pub(crate) fn note_empty(output: Output, text: &str) {
    if output.format == Format::Table && io::stdout().is_terminal() {
        note(text);
    }
}

/// Asks for confirmation of a destructive command. Without a terminal it requires `--yes`.
pub(crate) fn confirm(what: &str, yes: bool) -> Outcome {
    if yes {
        return Ok(());
    }
    if !(io::stdin().is_terminal() && io::stderr().is_terminal()) {
        return Err(Failure::usage(format!("will not {what} unasked")).hint("add --yes to do it"));
    }
    eprint!("{what}? [y/N] ");
    io::stderr().flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    match answer.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => Err(Failure::error("nothing was changed")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_lines_up_and_has_no_trailing_blanks() {
        let mut section = Section::new(&["NAME", ">SIZE", "NOTE"]);
        section.row(vec!["a".into(), "5".into(), String::new()]);
        section.row(vec!["longer".into(), "1000".into(), "x".into()]);
        let wanted = "NAME    SIZE  NOTE\na          5\nlonger  1000  x";
        assert_eq!(section.render(false), wanted);
    }

    #[test]
    fn control_characters_in_a_name_are_escaped() {
        let mut section = Section::new(&["GROUP", "STATE"]);
        section.row(vec!["a\u{1b}[31m\nadmin".into(), "모임".into()]);
        let wanted = "GROUP               STATE\na\\u{1b}[31m\\nadmin  모임";
        assert_eq!(section.render(false), wanted);
    }

    #[test]
    fn without_a_terminal_a_destructive_command_requires_yes() {
        assert!(confirm("delete it", true).is_ok());
        if !io::stdin().is_terminal() {
            assert_eq!(confirm("delete it", false).unwrap_err().status, crate::exit::Status::Usage);
        }
    }
}
