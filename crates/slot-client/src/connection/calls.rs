//! The call table of a connection: pending replies. Slots are reused, so a call allocates nothing.
//!
//! Invariant: a slot is free, or it belongs to one caller until the reply was taken or, after the caller was
//! cancelled, until the reply arrived.

use std::task::Waker;

use bytes::Bytes;
use moim_wire_resp::Value;

use super::Lost;

/// A slot of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallKey(u32);

#[derive(Default)]
struct Call {
    /// The frame; taken when it is passed to the socket.
    frame: Option<Bytes>,
    /// Number of outstanding replies.
    replies: u32,
    /// The first error among the replies before the last.
    error: Option<Value>,
    waker: Option<Waker>,
    state: State,
}

#[derive(Default, Debug, PartialEq)]
enum State {
    #[default]
    Free,
    Waiting,
    /// The caller was cancelled.
    Abandoned,
    Done(Result<Value, Lost>),
}

/// All calls of a connection.
#[derive(Default)]
pub(super) struct Calls {
    slots: Vec<Call>,
    free: Vec<u32>,
}

impl Calls {
    /// Number of calls in progress.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn insert(&mut self, frame: Bytes, replies: u32) -> CallKey {
        let call = Call { frame: Some(frame), replies, state: State::Waiting, ..Call::default() };
        match self.free.pop() {
            Some(index) => {
                self.slots[index as usize] = call;
                CallKey(index)
            }
            None => {
                self.slots.push(call);
                CallKey(u32::try_from(self.slots.len() - 1).expect("the queue is bounded far below 2^32"))
            }
        }
    }

    /// The frame to write, and its length; `None` when the caller was cancelled, which ends the call.
    pub(super) fn take_frame(&mut self, key: CallKey) -> (Option<Bytes>, usize) {
        let call = &mut self.slots[key.0 as usize];
        let frame = call.frame.take();
        let len = frame.as_ref().map_or(0, Bytes::len);
        if call.state == State::Abandoned {
            self.release(key);
            return (None, len);
        }
        (frame, len)
    }

    /// Accepts one reply. True when it was the last one of the call; the caller must be woken then.
    pub(super) fn on_value(&mut self, key: CallKey, value: Value) -> (bool, Option<Waker>) {
        let call = &mut self.slots[key.0 as usize];
        call.replies = call.replies.saturating_sub(1);
        if call.replies > 0 {
            if matches!(value, Value::Error(_)) && call.error.is_none() {
                call.error = Some(value);
            }
            return (false, None);
        }
        let value = call.error.take().unwrap_or(value);
        (true, self.complete(key, Ok(value)))
    }

    /// Completes a call; its caller must be woken.
    pub(super) fn complete(&mut self, key: CallKey, result: Result<Value, Lost>) -> Option<Waker> {
        let call = &mut self.slots[key.0 as usize];
        call.frame = None;
        if call.state == State::Waiting {
            call.state = State::Done(result);
            return call.waker.take();
        }
        if call.state == State::Abandoned {
            self.release(key);
        }
        None
    }

    /// All calls without a reply.
    pub(super) fn waiting(&self) -> Vec<CallKey> {
        let open = |call: &Call| matches!(call.state, State::Waiting | State::Abandoned);
        (0..self.slots.len())
            .filter(|index| open(&self.slots[*index]))
            .map(|index| CallKey(index as u32))
            .collect()
    }

    /// The reply, which ends the call; otherwise stores `waker`.
    pub(super) fn poll(&mut self, key: CallKey, waker: &Waker) -> Option<Result<Value, Lost>> {
        let call = &mut self.slots[key.0 as usize];
        if let State::Done(_) = call.state {
            let State::Done(result) = std::mem::take(&mut call.state) else { return None };
            self.release(key);
            return Some(result);
        }
        match &mut call.waker {
            Some(known) => known.clone_from(waker),
            None => call.waker = Some(waker.clone()),
        }
        None
    }

    /// The caller was cancelled.
    pub(super) fn abandon(&mut self, key: CallKey) {
        let call = &mut self.slots[key.0 as usize];
        call.waker = None;
        match call.state {
            State::Waiting => call.state = State::Abandoned,
            State::Done(_) => self.release(key),
            State::Free | State::Abandoned => {}
        }
    }

    fn release(&mut self, key: CallKey) {
        self.slots[key.0 as usize] = Call::default();
        self.free.push(key.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn poll(calls: &mut Calls, key: CallKey) -> Option<Result<Value, Lost>> {
        calls.poll(key, Waker::noop())
    }

    #[test]
    fn reply_reaches_its_caller_and_frees_the_slot() {
        let mut calls = Calls::default();
        let key = calls.insert("x".into(), 1);
        assert_eq!(poll(&mut calls, key), None);
        assert_eq!(calls.take_frame(key), (Some("x".into()), 1));
        assert!(calls.on_value(key, Value::ok()).1.is_some());
        assert_eq!(poll(&mut calls, key), Some(Ok(Value::ok())));
        assert_eq!((calls.len(), calls.insert("y".into(), 1)), (0, key));
    }

    #[test]
    fn unit_returns_its_last_value_or_its_first_error() {
        let mut calls = Calls::default();
        let key = calls.insert("x".into(), 3);
        assert!(!calls.on_value(key, Value::Error("MOVED 1 a:1".into())).0);
        assert!(!calls.on_value(key, Value::Error("ERR other".into())).0);
        assert!(calls.on_value(key, Value::Error("EXECABORT".into())).0);
        assert_eq!(poll(&mut calls, key), Some(Ok(Value::Error("MOVED 1 a:1".into()))));
    }

    #[test]
    fn cancelled_call_is_not_written_and_its_reply_is_dropped() {
        let mut calls = Calls::default();
        let (early, late) = (calls.insert("a".into(), 1), calls.insert("bc".into(), 1));
        calls.abandon(early);
        assert_eq!(calls.take_frame(early), (None, 1));
        assert_eq!(calls.take_frame(late), (Some("bc".into()), 2));
        calls.abandon(late);
        assert_eq!((calls.len(), calls.waiting()), (1, vec![late]));
        assert!(calls.on_value(late, Value::ok()).0);
        assert_eq!(calls.len(), 0);
    }
}
