//! The encoding of a Raft entry: a batch of commands proposed by one node.
//!
//! Format byte, the proposer's nonce and its batch number, the count of commands; then each command with its length.
//! The proposer recognizes its own batch by nonce and number when the entry is applied. A nonce is drawn at every
//! start, so entries proposed before a restart match no waiter.

use bytes::{Buf, Bytes};

use crate::codec::DecodeError;
use crate::error::Error;
use crate::request::{Command, MAX_REQUEST_BYTES};

const FORMAT: u8 = 2;
const HEAD: usize = 21;
const COUNT_AT: usize = 17;

/// Identifies the proposer of a batch, and the batch among its batches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BatchId {
    /// Drawn at each start of the proposer.
    pub(super) nonce: u64,
    /// Counted by the proposer.
    pub(super) number: u64,
}

/// A batch that is being encoded.
pub(super) struct BatchBuilder {
    bytes: Vec<u8>,
    count: u32,
}

impl BatchBuilder {
    pub(super) fn new() -> Self {
        Self { bytes: vec![0; HEAD], count: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Adds a command; refuses one above the request size limit.
    pub(super) fn push(&mut self, command: &Command) -> Result<(), Error> {
        let at = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 4]);
        command.encode(&mut self.bytes);
        let length = self.bytes.len() - at - 4;
        match u32::try_from(length) {
            Ok(length) if length as usize <= MAX_REQUEST_BYTES => {
                self.bytes[at..at + 4].copy_from_slice(&length.to_le_bytes());
                self.count += 1;
                Ok(())
            }
            Ok(_) | Err(_) => {
                self.bytes.truncate(at);
                Err(Error::RequestTooLarge)
            }
        }
    }

    pub(super) fn finish(mut self, id: BatchId) -> Bytes {
        self.bytes[0] = FORMAT;
        self.bytes[1..9].copy_from_slice(&id.nonce.to_le_bytes());
        self.bytes[9..COUNT_AT].copy_from_slice(&id.number.to_le_bytes());
        self.bytes[COUNT_AT..HEAD].copy_from_slice(&self.count.to_le_bytes());
        Bytes::from(self.bytes)
    }
}

/// A batch decoded from an entry.
pub(super) struct Batch {
    pub(super) id: BatchId,
    /// Number of commands not decoded yet.
    pub(super) count: u32,
    commands: Bytes,
}

impl Batch {
    pub(super) fn decode(mut entry: Bytes) -> Result<Self, DecodeError> {
        if entry.len() < HEAD {
            return Err(DecodeError::Truncated);
        }
        match entry.get_u8() {
            FORMAT => {}
            other => return Err(DecodeError::Format(other)),
        }
        let id = BatchId { nonce: entry.get_u64_le(), number: entry.get_u64_le() };
        Ok(Self { id, count: entry.get_u32_le(), commands: entry })
    }

    /// The next command. Keys and values are slices of the entry.
    pub(super) fn next(&mut self) -> Option<Result<Command, DecodeError>> {
        if self.count == 0 {
            let left = self.commands.len();
            return (left > 0).then_some(Err(DecodeError::Trailing(left)));
        }
        if self.commands.len() < 4 {
            return Some(Err(DecodeError::Truncated));
        }
        let length = self.commands.get_u32_le() as usize;
        if length > self.commands.len() {
            return Some(Err(DecodeError::Truncated));
        }
        self.count -= 1;
        Some(Command::decode(self.commands.split_to(length)))
    }

    /// Validates the bytes of a peer before they are proposed.
    pub(super) fn check(entry: &Bytes) -> Result<(), DecodeError> {
        let mut batch = Self::decode(entry.clone())?;
        while let Some(command) = batch.next() {
            command?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Op, PutRequest};

    fn put(size: usize) -> Command {
        Command::client(Op::Put(PutRequest::new("key", vec![7; size])))
    }

    #[test]
    fn batch_round_trips_and_malformed_bytes_are_refused() {
        let mut builder = BatchBuilder::new();
        for size in [0, 1, 70_000] {
            builder.push(&put(size)).unwrap();
        }
        assert_eq!(builder.push(&put(MAX_REQUEST_BYTES)), Err(Error::RequestTooLarge));
        let id = BatchId { nonce: 9, number: 7 };
        let entry = builder.finish(id);
        Batch::check(&entry).unwrap();
        let mut batch = Batch::decode(entry.clone()).unwrap();
        assert_eq!((batch.id, batch.count), (id, 3));
        for size in [0, 1, 70_000] {
            assert_eq!(batch.next(), Some(Ok(put(size))));
        }
        assert_eq!(batch.next(), None);
        for end in [0, 5, HEAD, HEAD + 3, HEAD + 9, entry.len() - 1] {
            assert!(Batch::check(&entry.slice(..end)).is_err(), "truncated at {end}");
        }
        let mut longer = entry.to_vec();
        longer.push(0);
        assert_eq!(Batch::check(&longer.into()), Err(DecodeError::Trailing(1)));
        assert_eq!(Batch::check(&Bytes::from(vec![1; 40])), Err(DecodeError::Format(1)));
    }
}
