//! MIGRATE: transfers keys to another server with RESTORE-ASKING and deletes them here.
//!
//! The keys are sent only when all their changes are committed here, and deleted only after the target has replied.
//! Other clients continue meanwhile; a key that they modify is sent again before it is deleted.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use bytes::BytesMut;
use moim_wire_resp::{Args, Encoder, OwnedArgs, ReplyDecoder, Value, command};

use super::dump::payload;
use super::flag::{MOVABLEKEYS, WRITE};
use super::{Keys, Spec};
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::offloaded::{self, Offloaded};

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("migrate", -6, WRITE | MOVABLEKEYS, Keys::Found { first: 3, find: migrate_keys }, "generic", "Transfers keys to another Redis instance.", migrate),
];

/// Attempts to send a key that keeps changing.
const MAX_ATTEMPTS: usize = 16;

fn migrate_keys(args: &Args<'_>, into: &mut Vec<usize>) {
    if args.get(3).is_some_and(|key| !key.is_empty()) {
        into.push(3);
    } else if let Some(at) = (6..args.len()).find(|at| args[*at].eq_ignore_ascii_case(b"KEYS")) {
        into.extend(at + 1..args.len());
    }
}

/// The parsed MIGRATE arguments.
struct MigrateArgs {
    host: String,
    port: u16,
    database: i64,
    timeout: Duration,
    copies: bool,
    replaces: bool,
    auth: Vec<Vec<u8>>,
    keys: Vec<Vec<u8>>,
}

impl MigrateArgs {
    fn read(ctx: &Ctx<'_>) -> Result<MigrateArgs, Error> {
        let (mut copies, mut replaces, mut auth, mut listed) = (false, false, Vec::new(), None);
        let mut at = 6;
        while at < ctx.argc() {
            let left = ctx.argc() - at - 1;
            if ctx.is(at, "COPY") {
                copies = true;
            } else if ctx.is(at, "REPLACE") {
                replaces = true;
            } else if ctx.is(at, "AUTH") && left >= 1 {
                auth = vec![b"AUTH".to_vec(), ctx.arg(at + 1).to_vec()];
                at += 1;
            } else if ctx.is(at, "AUTH2") && left >= 2 {
                auth = vec![b"AUTH".to_vec(), ctx.arg(at + 1).to_vec(), ctx.arg(at + 2).to_vec()];
                at += 2;
            } else if ctx.is(at, "KEYS") {
                if !ctx.arg(3).is_empty() {
                    let text =
                        "When using MIGRATE KEYS option, the key argument must be set to the empty string";
                    return Err(Error::err(text));
                }
                listed = Some(at + 1);
                break;
            } else {
                return Err(Error::SYNTAX);
            }
            at += 1;
        }
        let timeout = ctx.int(5)?;
        let database = ctx.int(4)?;
        let keys = match listed {
            Some(first) => (first..ctx.argc()).map(|at| ctx.arg(at)).collect(),
            None => vec![ctx.arg(3)],
        };
        let keys = keys.into_iter().filter(|key| ctx.db.contains(key)).map(<[u8]>::to_vec).collect();
        Ok(MigrateArgs {
            host: String::from_utf8_lossy(ctx.arg(1)).into_owned(),
            port: u16::try_from(ctx.int(2)?).map_err(|_| Error::NOT_INTEGER)?,
            database,
            timeout: Duration::from_millis(u64::try_from(timeout).ok().filter(|ms| *ms > 0).unwrap_or(1000)),
            copies,
            replaces,
            auth,
            keys,
        })
    }
}

fn migrate(ctx: &mut Ctx<'_>) -> Done {
    let wanted = MigrateArgs::read(ctx)?;
    if wanted.keys.is_empty() {
        ctx.out.simple("NOKEY");
        return Ok(());
    }
    // All writes before this command, including the current batch.
    let batch = ctx.events.hazards.batch;
    let gate = if ctx.fx.is_empty() { batch - 1 } else { batch };
    if offloaded::run(ctx, move |away| work(away, wanted, gate)) {
        return Ok(());
    }
    Err(Error::err("MIGRATE is not possible inside a transaction or a script"))
}

fn work(away: Offloaded, wanted: MigrateArgs, gate: i64) {
    let mut out = BytesMut::new();
    let mut to = Encoder::new(&mut out, away.protocol);
    let gate = match transfer(&away, &wanted, gate) {
        Ok(gate) => {
            to.ok();
            gate
        }
        Err(error) => {
            to.error(error.0.as_bytes());
            0
        }
    };
    away.answer(out.freeze(), gate);
}

/// Sends the keys and deletes them; returns the journal end of the deletion.
fn transfer(away: &Offloaded, wanted: &MigrateArgs, gate: i64) -> Result<i64, Error> {
    wait_for_commit(away, wanted, gate)?;
    let mut target = Target::connect(wanted)?;
    let (mut keys, mut last_gate) = (wanted.keys.clone(), 0);
    for round in 0..MAX_ATTEMPTS {
        let mut payloads = Vec::new();
        let now = {
            let turn = away.turn();
            let now = turn.now;
            for key in &keys {
                let Some(item) = turn.state.db.get(key) else { continue };
                payloads.push((key.clone(), turn.state.db.expiry(key).flatten(), payload(item)));
            }
            now
        };
        if away.is_void() {
            return Err(another_primary());
        }
        if payloads.is_empty() {
            return Ok(last_gate);
        }
        target.restore(&payloads, now, wanted.replaces || round > 0)?;
        if wanted.copies {
            return Ok(0);
        }
        let (changed, gate) = delete_unchanged(away, &payloads);
        last_gate = last_gate.max(gate);
        if away.is_void() {
            return Err(another_primary());
        }
        if changed.is_empty() {
            return Ok(last_gate);
        }
        wait_for_commit(away, wanted, gate)?;
        keys = changed;
    }
    Err(Error::err("keys change faster than they can be moved"))
}

/// A key as sent: name, expire time and payload.
type Sent = (Vec<u8>, Option<i64>, Vec<u8>);

fn another_primary() -> Error {
    Error::coded("TRYAGAIN The shard has another primary")
}

fn wait_for_commit(away: &Offloaded, wanted: &MigrateArgs, gate: i64) -> Done {
    let clock = &away.shared.clock;
    let until = clock.monotonic_ms() + wanted.timeout.as_millis() as u64;
    while away.shard.committed() < gate {
        if clock.monotonic_ms() >= until {
            return Err(Error::coded("IOERR error or timeout writing to the journal"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Deletes the keys that are unchanged since they were sent; returns the others, and the journal end to wait for.
fn delete_unchanged(away: &Offloaded, sent: &[Sent]) -> (Vec<Vec<u8>>, i64) {
    let mut turn = away.turn();
    let (mut changed, mut gone) = (Vec::new(), vec![b"DEL".to_vec()]);
    for (key, expires_at, bytes) in sent {
        let is_same = turn.state.db.expiry(key).flatten() == *expires_at;
        match turn.state.db.get(key) {
            Some(item) if is_same && payload(item) == *bytes => gone.push(key.clone()),
            Some(_) => changed.push(key.clone()),
            None => {}
        }
    }
    let mut gate = 0;
    if gone.len() > 1 {
        let (mut session, mut out) = (away.session(), BytesMut::new());
        gate = turn.execute(&mut session, &OwnedArgs::from_slices(&gone).args(), &mut out);
        if session.held {
            // The slot is being migrated by a slot migration: these keys are retried.
            changed.extend(gone.drain(1..));
        }
    }
    turn.finish();
    (changed, gate)
}

/// The connection to the target server.
struct Target {
    stream: TcpStream,
    decoder: ReplyDecoder,
    buffer: BytesMut,
}

impl Target {
    fn connect(wanted: &MigrateArgs) -> Result<Target, Error> {
        let failed = || Error::coded("IOERR error or timeout connecting to the client");
        let addresses = (wanted.host.as_str(), wanted.port).to_socket_addrs().map_err(|_| failed())?;
        let stream = addresses
            .into_iter()
            .find_map(|address| TcpStream::connect_timeout(&address, wanted.timeout).ok())
            .ok_or_else(failed)?;
        let ready = || -> io::Result<()> {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(wanted.timeout))?;
            stream.set_write_timeout(Some(wanted.timeout))
        };
        ready().map_err(|_| failed())?;
        let mut target = Target { stream, decoder: ReplyDecoder::new(64 << 20), buffer: BytesMut::new() };
        if !wanted.auth.is_empty() {
            target.call(&wanted.auth)?;
        }
        if wanted.database != 0 {
            target.call(&[b"SELECT".to_vec(), wanted.database.to_string().into_bytes()])?;
        }
        Ok(target)
    }

    fn call(&mut self, words: &[Vec<u8>]) -> Done {
        let mut request = BytesMut::new();
        command::encode(&mut request, words);
        self.send(&request)?;
        self.reply()
    }

    fn send(&mut self, bytes: &[u8]) -> Done {
        let failed = |_| Error::coded("IOERR error or timeout writing to target instance");
        self.stream.write_all(bytes).map_err(failed)
    }

    fn reply(&mut self) -> Done {
        let failed = || Error::coded("IOERR error or timeout reading from target instance");
        loop {
            match self.decoder.decode(&mut self.buffer).map_err(|_| failed())? {
                Some(Value::Error(text)) => {
                    let text = String::from_utf8_lossy(&text).into_owned();
                    return Err(Error::err(format_args!("Target instance replied with error: {text}")));
                }
                Some(_) => return Ok(()),
                None => {}
            }
            let mut chunk = [0; 16 << 10];
            match self.stream.read(&mut chunk) {
                Ok(0) | Err(_) => return Err(failed()),
                Ok(count) => self.buffer.extend_from_slice(&chunk[..count]),
            }
        }
    }

    /// Pipelines all RESTORE commands and reads all replies; the first error is the result.
    fn restore(&mut self, payloads: &[Sent], now: i64, replace: bool) -> Done {
        let mut request = BytesMut::new();
        for (key, expires_at, bytes) in payloads {
            let ttl = expires_at.map_or(0, |at| (at - now).max(1)).to_string();
            let mut words: Vec<&[u8]> = vec![b"RESTORE-ASKING", key, ttl.as_bytes(), bytes];
            if replace {
                words.push(b"REPLACE");
            }
            command::encode(&mut request, &words);
        }
        self.send(&request)?;
        let mut outcome = Ok(());
        for _ in payloads {
            if let Err(error) = self.reply() {
                let broken = error.code() == "IOERR";
                outcome = outcome.and(Err(error));
                if broken {
                    break;
                }
            }
        }
        outcome
    }
}
