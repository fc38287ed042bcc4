//! The implementation of the commands, one file per noun or verb. A command gets its parsed flags and prints one report.

pub(crate) mod bench;
pub(crate) mod cluster;
pub(crate) mod config;
pub(crate) mod coord;
pub(crate) mod demo;
pub(crate) mod dev;
pub(crate) mod group;
pub(crate) mod lock;
pub(crate) mod manager;
pub(crate) mod pipeline;
pub(crate) mod routing;
pub(crate) mod slots;
pub(crate) mod topic;
pub(crate) mod version;

use serde::Serialize;

use crate::exit::{Failure, Outcome};
use crate::kafka::errors;
use crate::output::{Format, Output, Report, Section};

/// Runs a command that talks to servers, on a runtime of this thread.
pub(crate) fn block_on<F: Future<Output = Outcome>>(future: F) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(future)
}

/// The outcome of a verb that does the same to several things: what was done goes to stdout, what failed to
/// stderr, and one failure is enough for the exit status.
#[derive(Default, Serialize)]
struct Steps {
    results: Vec<Step>,
    #[serde(skip)]
    failures: Vec<Failure>,
}

#[derive(Serialize)]
struct Step {
    name: String,
    ok: bool,
    result: String,
    error_code: Option<String>,
}

impl Steps {
    /// Records the server's result for one object; `done` is the text of a success.
    fn add(&mut self, name: &str, done: &str, code: i16, message: Option<&str>) {
        if code == 0 {
            let step = Step { name: name.to_owned(), ok: true, result: done.to_owned(), error_code: None };
            self.results.push(step);
            return;
        }
        let failure = errors::failure(code, message).context(name);
        let result = failure.message.clone();
        self.results.push(Step {
            name: name.to_owned(),
            ok: false,
            result,
            error_code: Some(errors::name(code)),
        });
        self.failures.push(failure);
    }

    /// Prints the results; fails with the first failure.
    fn finish(mut self, output: Output) -> Outcome {
        let any_done = self.results.iter().any(|step| step.ok);
        if any_done || output.format == Format::Json {
            output.print(&self)?;
        }
        if self.failures.is_empty() {
            return Ok(());
        }
        let first = self.failures.remove(0);
        for other in &self.failures {
            other.report();
        }
        Err(first)
    }
}

impl Report for Steps {
    fn sections(&self) -> Vec<Section> {
        let mut table = Section::new(&["NAME", "RESULT"]);
        for step in self.results.iter().filter(|step| step.ok) {
            table.row(vec![step.name.clone(), step.result.clone()]);
        }
        vec![table]
    }
}

/// Numbers with commas between: `1,2,3`; a dash for none.
fn joined(numbers: &[i32]) -> String {
    if numbers.is_empty() {
        return "-".to_owned();
    }
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// A number, or a dash.
fn or_dash(number: Option<impl ToString>) -> String {
    number.map_or_else(|| "-".to_owned(), |number| number.to_string())
}
