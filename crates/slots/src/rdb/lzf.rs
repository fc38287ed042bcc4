//! LZF decompression: literal runs and back references.

use super::BadFormat;

/// Maximum expansion per input byte: a three-byte reference stands for 264 bytes.
const MAX_EXPANSION: usize = 264;

/// Decompresses to exactly `length` bytes.
pub(super) fn unpack(input: &[u8], length: usize) -> Result<Vec<u8>, BadFormat> {
    if length > input.len().saturating_mul(MAX_EXPANSION) {
        return Err(BadFormat);
    }
    let mut output = Vec::with_capacity(length);
    let mut input = input.iter().copied();
    while let Some(control) = input.next() {
        let control = usize::from(control);
        if control < 32 {
            for _ in 0..=control {
                output.push(input.next().ok_or(BadFormat)?);
            }
        } else {
            let mut run = control >> 5;
            if run == 7 {
                run += usize::from(input.next().ok_or(BadFormat)?);
            }
            let back = ((control & 0x1f) << 8) + usize::from(input.next().ok_or(BadFormat)?) + 1;
            let from = output.len().checked_sub(back).ok_or(BadFormat)?;
            for at in from..from + run + 2 {
                output.push(output[at]);
            }
        }
        if output.len() > length {
            return Err(BadFormat);
        }
    }
    if output.len() == length { Ok(output) } else { Err(BadFormat) }
}
