//! The arguments of one command: slices of one buffer, the command's name first.
//!
//! Invariant: every span lies inside the buffer it came with; only this crate makes spans.

use std::ops::Index;

use bytes::Bytes;

/// Where an argument lies in its buffer. 32 bits are enough: a request is limited to less than 4 GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) start: u32,
    pub(crate) len: u32,
}

impl Span {
    /// A span of `len` bytes from `start` on. `None` past 4 GiB.
    pub(crate) fn new(start: usize, len: usize) -> Option<Self> {
        Some(Self { start: u32::try_from(start).ok()?, len: u32::try_from(len).ok()? })
    }
}

/// The arguments of a command, borrowed from the buffer they arrived in. Copying it copies two pointers.
#[derive(Clone, Copy)]
pub struct Args<'a> {
    bytes: &'a [u8],
    spans: &'a [Span],
}

impl<'a> Args<'a> {
    pub(crate) fn new(bytes: &'a [u8], spans: &'a [Span]) -> Self {
        Self { bytes, spans }
    }

    /// How many arguments there are, the name of the command included.
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    /// Whether there are none: not even a name.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Argument `index`; 0 is the command's name.
    pub fn get(&self, index: usize) -> Option<&'a [u8]> {
        self.spans.get(index).map(|span| self.slice(*span))
    }

    /// The command's name as it was sent; empty when there is none.
    pub fn name(&self) -> &'a [u8] {
        self.get(0).unwrap_or_default()
    }

    /// The arguments from `index` on; none when there are fewer.
    pub fn from(&self, index: usize) -> Args<'a> {
        Args { bytes: self.bytes, spans: self.spans.get(index..).unwrap_or_default() }
    }

    /// The arguments in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &'a [u8]> + ExactSizeIterator + Clone + use<'a> {
        let bytes = self.bytes;
        self.spans.iter().map(move |span| &bytes[span.start as usize..][..span.len as usize])
    }

    /// How many bytes the arguments have together.
    pub fn byte_len(&self) -> usize {
        self.spans.iter().map(|span| span.len as usize).sum()
    }

    /// A copy that outlives the buffer: what MULTI queues and what blocked commands keep.
    pub fn to_owned(&self) -> OwnedArgs {
        OwnedArgs::from_slices(self.iter())
    }

    fn slice(&self, span: Span) -> &'a [u8] {
        &self.bytes[span.start as usize..][..span.len as usize]
    }
}

impl Index<usize> for Args<'_> {
    type Output = [u8];

    /// # Panics
    /// When there is no such argument: for commands whose arity was checked.
    fn index(&self, index: usize) -> &[u8] {
        self.slice(self.spans[index])
    }
}

impl std::fmt::Debug for Args<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter().map(|arg| String::from_utf8_lossy(arg))).finish()
    }
}

/// The arguments of a command with the buffer they lie in.
#[derive(Clone, PartialEq, Eq)]
pub struct OwnedArgs {
    bytes: Bytes,
    spans: Box<[Span]>,
}

impl OwnedArgs {
    /// Copies `args` into one buffer.
    ///
    /// # Panics
    /// When they are 4 GiB or more together.
    pub fn from_slices<A: AsRef<[u8]>>(args: impl IntoIterator<Item = A, IntoIter: Clone>) -> Self {
        let args = args.into_iter();
        // Both as large as they will be: a large argument is copied once.
        let (count, len) =
            args.clone().fold((0, 0), |(count, len), arg| (count + 1, len + arg.as_ref().len()));
        let (mut bytes, mut spans) = (Vec::with_capacity(len), Vec::with_capacity(count));
        for arg in args {
            let arg = arg.as_ref();
            spans.push(Span::new(bytes.len(), arg.len()).expect("a command is smaller than 4 GiB"));
            bytes.extend_from_slice(arg);
        }
        Self { bytes: bytes.into(), spans: spans.into() }
    }

    /// The arguments, as a command that just arrived has them.
    pub fn args(&self) -> Args<'_> {
        Args::new(&self.bytes, &self.spans)
    }
}

impl std::fmt::Debug for OwnedArgs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.args().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owned_arguments_read_like_borrowed_ones() {
        let owned = OwnedArgs::from_slices(["SET", "", "a b"]);
        let args = owned.args();
        assert_eq!((args.len(), args.byte_len(), args.name()), (3, 6, &b"SET"[..]));
        assert_eq!(args.iter().collect::<Vec<_>>(), [&b"SET"[..], b"", b"a b"]);
        assert_eq!((args.get(2), args.get(3), &args[1]), (Some(&b"a b"[..]), None, &b""[..]));
        assert_eq!(args.from(2).iter().collect::<Vec<_>>(), [&b"a b"[..]]);
        assert!(args.from(9).is_empty());
        assert_eq!(args.to_owned(), owned);
    }
}
