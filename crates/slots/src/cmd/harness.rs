//! Test harness: runs commands on a keyspace without a server, one reply per command, with access to the effects.

use bytes::BytesMut;
use moim_wire_resp::{Encoder, OwnedArgs, Protocol, ReplyDecoder, Value};

use crate::ctx::{Ctx, Mode};
use crate::effects::{self, Effects};
use crate::error::Error;
use crate::events::Events;
use crate::keyspace::Keyspace;
use crate::session::Session;
use crate::shared::Shared;

/// A keyspace with everything a command needs.
pub(crate) struct Harness {
    pub(crate) db: Keyspace,
    pub(crate) fx: Effects,
    pub(crate) events: Events,
    pub(crate) session: Session,
    pub(crate) shared: Shared,
    pub(crate) now: i64,
    pub(crate) mode: Mode,
    pub(crate) protocol: Protocol,
}

impl Harness {
    pub(crate) fn new() -> Harness {
        Harness {
            db: Keyspace::new(7),
            fx: Effects::default(),
            events: Events::default(),
            session: Session::internal(),
            shared: Shared::default(),
            now: 1_000_000,
            mode: Mode::Primary,
            protocol: Protocol::Resp2,
        }
    }

    /// Runs a command given as arguments. `None` if it blocks.
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

    /// Runs a command given as words and formats its reply.
    pub(crate) fn run(&mut self, command: &str) -> String {
        let args = OwnedArgs::from_slices(command.split_whitespace());
        self.run_args(&args).map_or("(waits)".into(), |reply| show(&reply))
    }

    /// Replays the effects so far on another keyspace.
    pub(crate) fn replay(&mut self, onto: &mut Harness) {
        let (_, commands) = effects::read(self.fx.payload(self.now)).unwrap();
        onto.mode = Mode::Replay;
        for command in commands {
            let reply = onto.run_args(&command);
            assert!(!matches!(reply, Some(Value::Error(_)) | None), "{command:?} {reply:?}");
        }
        onto.mode = Mode::Primary;
        self.fx.clear();
    }
}

/// Formats a reply: arrays in brackets, strings as they are.
pub(crate) fn show(reply: &Value) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let list = |parts: &[Value]| format!("[{}]", parts.iter().map(show).collect::<Vec<_>>().join(" "));
    match reply {
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

/// Checks lines of the form `command -> reply`. `(waits)` is a blocked client.
pub(crate) fn check(script: &str) {
    let mut harness = Harness::new();
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (command, wanted) = line.split_once(" -> ").unwrap_or((line, ""));
        let reply = harness.run(command);
        assert_eq!(reply, wanted, "{command}");
    }
}
