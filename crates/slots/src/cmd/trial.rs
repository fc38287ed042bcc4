//! Runs commands on a keyspace without a server, for tests: one command, one answer, effects at hand.

use bytes::BytesMut;
use moim_wire_resp::{Encoder, OwnedArgs, Protocol, ReplyDecoder, Value};

use crate::ctx::{Ctx, Mode};
use crate::effects::{self, Effects};
use crate::error::Error;
use crate::events::Events;
use crate::keyspace::Keyspace;
use crate::session::Session;
use crate::shared::Shared;

/// A keyspace and all that a command needs.
pub(crate) struct Trial {
    pub(crate) db: Keyspace,
    pub(crate) fx: Effects,
    pub(crate) events: Events,
    pub(crate) session: Session,
    pub(crate) shared: Shared,
    pub(crate) now: i64,
    pub(crate) mode: Mode,
    pub(crate) protocol: Protocol,
}

impl Trial {
    pub(crate) fn new() -> Trial {
        Trial {
            db: Keyspace::new(7),
            fx: Effects::default(),
            events: Events::default(),
            session: Session::nobody(),
            shared: Shared::default(),
            now: 1_000_000,
            mode: Mode::Primary,
            protocol: Protocol::Resp2,
        }
    }

    /// Runs a command given as arguments. `None` when it wants to wait.
    pub(crate) fn run_args(&mut self, args: &OwnedArgs) -> Option<Value> {
        let mut out = BytesMut::new();
        let args = args.args();
        match super::resolve(&args) {
            Some(spec) if spec.takes(args.len()) => {
                let mut ctx = Ctx {
                    args,
                    db: &mut self.db,
                    now: self.now,
                    out: Encoder::new(&mut out, self.protocol),
                    fx: &mut self.fx,
                    events: &mut self.events,
                    session: &mut self.session,
                    shared: &self.shared,
                    mode: self.mode,
                    nested: false,
                    in_script: false,
                    dirty: 0,
                    rewritten: false,
                };
                ctx.run(spec);
            }
            Some(spec) => Encoder::new(&mut out, self.protocol).error(&*Error::arity(spec.full_name()).0),
            None => {
                let name = String::from_utf8_lossy(args.name()).into_owned();
                Encoder::new(&mut out, self.protocol).error(format!("ERR unknown command '{name}'"));
            }
        }
        if self.session.block.take().is_some() {
            return None;
        }
        Some(ReplyDecoder::new(usize::MAX).decode(&mut out).unwrap().unwrap())
    }

    /// Runs a command given as words and shows its answer in words.
    pub(crate) fn run(&mut self, command: &str) -> String {
        let args = OwnedArgs::from_slices(command.split_whitespace());
        self.run_args(&args).map_or("(waits)".into(), |answer| show(&answer))
    }

    /// Replays what was recorded so far on another keyspace.
    pub(crate) fn replay(&mut self, onto: &mut Trial) {
        let (_, commands) = effects::read(self.fx.payload(self.now)).unwrap();
        onto.mode = Mode::Replay;
        for command in commands {
            let answer = onto.run_args(&command);
            assert!(!matches!(answer, Some(Value::Error(_)) | None), "{command:?} {answer:?}");
        }
        onto.mode = Mode::Primary;
        self.fx.clear();
    }
}

/// An answer in words: arrays in brackets, strings as they are.
pub(crate) fn show(answer: &Value) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let list = |parts: &[Value]| format!("[{}]", parts.iter().map(show).collect::<Vec<_>>().join(" "));
    match answer {
        Value::Null => "(nil)".into(),
        Value::Simple(word) => text(word),
        Value::Error(message) => format!("-{}", text(message)),
        Value::Integer(number) => format!(":{number}"),
        Value::Bulk(bytes) => text(bytes),
        Value::Array(parts) | Value::Push(parts) => list(parts),
        Value::Set(parts) => format!("~{}", list(parts)),
        Value::Map(pairs) => {
            format!(
                "%[{}]",
                pairs.iter().map(|(k, v)| format!("{}={}", show(k), show(v))).collect::<Vec<_>>().join(" ")
            )
        }
        Value::Double(number) => format!(",{number}"),
        Value::Boolean(truth) => format!("#{truth}"),
        Value::Verbatim { text: bytes, .. } => text(bytes),
        Value::BigNumber(digits) => text(digits),
    }
}

/// Runs commands line by line: `command -> answer`. `(waits)` is a client that blocks.
pub(crate) fn check(script: &str) {
    let mut trial = Trial::new();
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (command, wanted) = line.split_once(" -> ").unwrap_or((line, ""));
        let answer = trial.run(command);
        assert_eq!(answer, wanted, "{command}");
    }
}
