//! The socket task: writes frames, reads replies.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice};
use std::task::Waker;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use moim_wire_resp::Value;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::{Instant, MissedTickBehavior};

use super::calls::CallKey;
use super::open::Wire;
use super::{Connection, Kind, Phase};
use crate::signals::{Event, Trigger, count};

/// Frames up to this size are coalesced; larger frames are written without a copy.
const COPY_UP_TO: usize = 8 * 1024;

/// Maximum bytes taken from the queue at a time: more would only wait in the socket task.
const WRITE_AHEAD: usize = 256 * 1024;

/// Maximum bytes read before callers are woken.
const READ_AHEAD: usize = 256 * 1024;

/// Replies delivered at a time: a quarter of the calls in flight, within these bounds. Woken callers send
/// their next commands before the next replies are decoded; with one large batch, server and client would
/// alternate and wait for each other.
const REPLY_BATCH: (usize, usize) = (16, 128);

impl Connection {
    /// Serves until the connection fails (returns the reason) or, after a close, all replies were delivered
    /// (`None`).
    pub(super) async fn run(&self, mut wire: Wire) -> Option<String> {
        let mut sent: VecDeque<CallKey> = VecDeque::new();
        let mut out = Outgoing::default();
        let mut last_read = Instant::now();
        let mut tick = tokio::time::interval((self.options.hung_after / 4).max(Duration::from_millis(5)));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // Replies that are buffered and not delivered; the reason for which no more will arrive.
        let (mut is_behind, mut ended) = (false, None);
        let reason = loop {
            if sent.is_empty() {
                last_read = Instant::now();
            }
            // No frames are written to a failed connection: unsent commands are retried elsewhere.
            if ended.is_none() {
                if self.take_queue(&mut out, &mut sent) && sent.is_empty() {
                    break None;
                }
                ended = out.write(&wire.stream).err().map(|error| format!("write: {error}"));
            }
            if is_behind {
                match self.deliver_replies(&mut wire, &mut sent) {
                    Ok(more) => is_behind = more,
                    Err(reason) => break Some(reason),
                }
                // The server is not silent while this task delivers buffered replies.
                last_read = Instant::now();
                if is_behind {
                    // Woken callers run first.
                    tokio::task::yield_now().await;
                    continue;
                }
            }
            if ended.is_some() {
                break ended;
            }
            let interest =
                if out.is_empty() { Interest::READABLE } else { Interest::READABLE | Interest::WRITABLE };
            tokio::select! {
                ready = wire.stream.ready(interest) => match ready {
                    Ok(ready) if ready.is_readable() || ready.is_read_closed() => {
                        last_read = Instant::now();
                        ended = read(&mut wire);
                        is_behind = true;
                    }
                    Ok(_) => {}
                    Err(error) => break Some(error.to_string()),
                },
                () = self.wake.notified(), if out.len() < WRITE_AHEAD => {}
                _ = tick.tick() => {
                    let silent = last_read.elapsed();
                    if !sent.is_empty() && silent >= self.options.hung_after && self.kind != Kind::Exclusive {
                        count(&self.signals.metrics.hung);
                        self.signals.emit(Event::Hung(self.node.clone()));
                        self.signals.trigger(Trigger::Timeout);
                        break Some(format!("silent for {silent:?} although replies are outstanding"));
                    }
                }
            }
        };
        if reason.is_none() {
            self.fail_all("the connection was closed");
        }
        reason
    }

    /// Moves frames from the queue to the writer. True when the connection must close.
    fn take_queue(&self, out: &mut Outgoing, sent: &mut VecDeque<CallKey>) -> bool {
        let mut shared = self.lock();
        while out.len() < WRITE_AHEAD
            && let Some(key) = shared.queue.pop_front()
        {
            let (frame, len) = shared.calls.take_frame(key);
            shared.queued_bytes -= len;
            if let Some(frame) = frame {
                out.push(frame);
                sent.push_back(key);
            }
        }
        if !shared.queue.is_empty() && out.len() < WRITE_AHEAD {
            self.wake.notify_one();
        }
        shared.phase == Phase::Closed && shared.queue.is_empty()
    }

    /// Delivers buffered replies. True if there may be more.
    fn deliver_replies(&self, wire: &mut Wire, sent: &mut VecDeque<CallKey>) -> Result<bool, String> {
        let most = (sent.len() / 4).clamp(REPLY_BATCH.0, REPLY_BATCH.1);
        let mut values = Vec::with_capacity(most);
        let mut ended = None;
        while values.len() < most {
            match wire.decoder.decode(&mut wire.buffer) {
                // Unsolicited pushes are ignored here.
                Ok(Some(Value::Push(_))) => {}
                Ok(Some(value)) => values.push(value),
                Ok(None) => break,
                Err(error) => {
                    ended = Some(error.to_string());
                    break;
                }
            }
        }
        let more = values.len() == most;
        self.complete_calls(values, sent)?;
        ended.map_or(Ok(more), Err)
    }

    fn complete_calls(&self, values: Vec<Value>, sent: &mut VecDeque<CallKey>) -> Result<(), String> {
        if values.is_empty() {
            return Ok(());
        }
        let mut wakers: Vec<Waker> = Vec::with_capacity(values.len());
        let mut stray = false;
        let mut shared = self.lock();
        for value in values {
            let Some(key) = sent.front().copied() else {
                stray = true;
                break;
            };
            let (last, waker) = shared.calls.on_value(key, value);
            wakers.extend(waker);
            if last {
                sent.pop_front();
            }
        }
        let has_capacity = std::mem::take(&mut shared.has_rejected);
        drop(shared);
        wakers.into_iter().for_each(Waker::wake);
        if has_capacity {
            self.capacity.notify_waiters();
        }
        if stray { Err("reply without a pending command".to_owned()) } else { Ok(()) }
    }
}

/// Reads available bytes. Returns the reason when no more will arrive.
fn read(wire: &mut Wire) -> Option<String> {
    let mut total = 0;
    while total < READ_AHEAD {
        wire.buffer.reserve(16 * 1024);
        match wire.stream.try_read_buf(&mut wire.buffer) {
            Ok(0) => return Some("closed by the server".to_owned()),
            Ok(read) => total += read,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Some(error.to_string()),
        }
    }
    None
}

/// Frames on their way to the socket: large frames without a copy, small frames coalesced.
#[derive(Default)]
struct Outgoing {
    pieces: VecDeque<Bytes>,
    tail: BytesMut,
    len: usize,
}

impl Outgoing {
    fn len(&self) -> usize {
        self.len
    }

    fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn push(&mut self, frame: Bytes) {
        self.len += frame.len();
        if frame.len() <= COPY_UP_TO {
            self.tail.put_slice(&frame);
            return;
        }
        if !self.tail.is_empty() {
            self.pieces.push_back(self.tail.split().freeze());
        }
        self.pieces.push_back(frame);
    }

    /// Writes until everything is written or the socket buffer is full.
    fn write(&mut self, stream: &TcpStream) -> std::io::Result<()> {
        while self.len > 0 {
            let mut slices = [IoSlice::new(&[]); 64];
            let mut used = 0;
            for piece in self.pieces.iter().take(slices.len() - 1) {
                slices[used] = IoSlice::new(piece);
                used += 1;
            }
            if self.pieces.len() < slices.len() {
                slices[used] = IoSlice::new(&self.tail);
                used += 1;
            }
            match stream.try_write_vectored(&slices[..used]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => self.advance(written),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn advance(&mut self, mut written: usize) {
        self.len -= written;
        while let Some(piece) = self.pieces.front_mut() {
            if piece.len() > written {
                piece.advance(written);
                return;
            }
            written -= piece.len();
            self.pieces.pop_front();
        }
        self.tail.advance(written);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_keep_their_order_with_partial_writes() {
        let mut out = Outgoing::default();
        let large = "L".repeat(COPY_UP_TO + 1);
        for frame in ["a", "b", &large, "c"] {
            out.push(Bytes::copy_from_slice(frame.as_bytes()));
        }
        assert_eq!((out.len(), out.pieces.len()), (large.len() + 3, 2));
        let mut seen = Vec::new();
        while !out.is_empty() {
            let first = out.pieces.front().map_or(&out.tail[..], |piece| &piece[..]);
            let step = first.len().min(3);
            seen.extend_from_slice(&first[..step]);
            out.advance(step);
        }
        assert_eq!(seen, format!("ab{large}c").into_bytes());
    }
}
