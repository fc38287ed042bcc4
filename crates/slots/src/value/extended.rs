//! 80-bit floats, the `long double` in which Redis adds for INCRBYFLOAT and HINCRBYFLOAT: a 64-bit mantissa, round to
//! nearest, ties to even, like the x87. Only what addition needs: parse a decimal, add, format as plain decimal.
//!
//! Implemented with integers, so that every machine gives the same digits. Numbers below the exponent range are not
//! flushed to zero; such increments do not occur in practice.

/// `mantissa * 2^exponent`; the mantissa has its top bit set, or the number is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extended {
    is_negative: bool,
    mantissa: u64,
    exponent: i32,
}

/// The maximum decimal exponent.
const MAX_POWER: i64 = 4932;
const MIN_POWER: i64 = -4951;
/// Decimal places written.
const DIGITS: usize = 17;

impl Extended {
    const ZERO: Extended = Extended { is_negative: false, mantissa: 0, exponent: 0 };

    /// The float nearest to `bits * 2^exponent`; `has_more` adds a sticky bit below.
    fn round(is_negative: bool, bits: u128, exponent: i32, has_more: bool) -> Extended {
        if bits == 0 {
            return Self::ZERO;
        }
        let length = 128 - bits.leading_zeros() as i32;
        if length <= 64 {
            let shift = 64 - length;
            return Extended { is_negative, mantissa: (bits as u64) << shift, exponent: exponent - shift };
        }
        let shift = length - 64;
        let (kept, cut) = ((bits >> shift) as u64, bits & ((1 << shift) - 1));
        let half = 1u128 << (shift - 1);
        let goes_up = cut > half || cut == half && (has_more || kept & 1 == 1);
        let exponent = exponent + shift;
        match kept.checked_add(u64::from(goes_up)) {
            Some(mantissa) => Extended { is_negative, mantissa, exponent },
            None => Extended { is_negative, mantissa: 1 << 63, exponent: exponent + 1 },
        }
    }

    /// Converts a double, exactly.
    pub(super) fn from_f64(number: f64) -> Extended {
        let bits = number.abs().to_bits();
        let (power, fraction) = ((bits >> 52) as i32, bits & ((1 << 52) - 1));
        let (mantissa, exponent) =
            if power == 0 { (fraction, -1074) } else { (fraction | 1 << 52, power - 1075) };
        Self::round(number.is_sign_negative(), u128::from(mantissa), exponent, false)
    }

    /// Parses a decimal with an optional point and exponent, rounded to nearest. `None` if it is not a number or out
    /// of range.
    pub(super) fn parse(text: &str) -> Option<Extended> {
        let (is_negative, text) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix('+').unwrap_or(text)),
        };
        let (number, power) = match text.find(['e', 'E']) {
            Some(at) => (&text[..at], power_of(&text[at + 1..])?),
            None => (text, 0),
        };
        let (whole, part) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() && part.is_empty() {
            return None;
        }
        let mut digits = Big::default();
        for digit in whole.bytes().chain(part.bytes()) {
            if !digit.is_ascii_digit() {
                return None;
            }
            digits.multiply_add(10, u32::from(digit - b'0'));
        }
        if digits.is_zero() {
            return Some(Self::ZERO);
        }
        let power = power - part.len() as i64;
        // Approximate decimal exponent of the first digit: enough to detect what is out of range.
        let first = power + (digits.bits() as i64 - 1) * 30_103 / 100_000;
        if !(MIN_POWER..=MAX_POWER).contains(&first) {
            return None;
        }
        let ten = Big::power_of_ten(power.unsigned_abs() as usize);
        if power >= 0 {
            return Some(digits.times(&ten).round(is_negative));
        }
        let shift = (67 + ten.bits() as i32 - digits.bits() as i32).max(0);
        let (quotient, has_more) = digits.shifted(shift as usize).divided(&ten);
        Some(quotient.round_with(is_negative, -shift, has_more))
    }

    /// The rounded sum.
    pub(super) fn plus(self, other: Extended) -> Extended {
        if self.mantissa == 0 || other.mantissa == 0 {
            return if self.mantissa == 0 { other } else { self };
        }
        let (large, small) = if (self.exponent, self.mantissa) >= (other.exponent, other.mantissa) {
            (self, other)
        } else {
            (other, self)
        };
        // 62 bits below the mantissa: bits shifted out of the smaller operand only set the sticky bit.
        const BELOW: i32 = 62;
        let distance = large.exponent - small.exponent;
        let a = u128::from(large.mantissa) << BELOW;
        let b = u128::from(small.mantissa) << BELOW;
        let (b, has_more) = match distance {
            0 => (b, false),
            1..=127 => (b >> distance, b & ((1 << distance) - 1) != 0),
            _ => (0, true),
        };
        // A remainder below a difference borrows one and sets the sticky bit.
        let bits = match large.is_negative == small.is_negative {
            true => a + b,
            false => a - b - u128::from(has_more),
        };
        Self::round(large.is_negative, bits, large.exponent - BELOW, has_more)
    }

    /// Formats as plain decimal: at most 17 decimal places, without trailing zeros.
    pub(super) fn format(self) -> String {
        let sign = if self.is_negative { "-" } else { "" };
        if self.exponent >= 0 {
            let text = Big::from_u64(self.mantissa).shifted(self.exponent as usize).decimal();
            return if text == "0" { text } else { format!("{sign}{text}") };
        }
        let scaled = u128::from(self.mantissa) * 10u128.pow(DIGITS as u32);
        let shift = self.exponent.unsigned_abs();
        let rounded = match shift {
            ..128 => {
                let (kept, cut, half) = (scaled >> shift, scaled & ((1 << shift) - 1), 1u128 << (shift - 1));
                kept + u128::from(cut > half || cut == half && kept & 1 == 1)
            }
            _ => 0,
        };
        if rounded == 0 {
            return "0".to_owned();
        }
        let unit = 10u128.pow(DIGITS as u32);
        let (whole, part) = (rounded / unit, rounded % unit);
        if part == 0 {
            return format!("{sign}{whole}");
        }
        let part = format!("{part:017}");
        format!("{sign}{whole}.{}", part.trim_end_matches('0'))
    }
}

/// Parses a decimal exponent, saturating: what is far out of range stays out of range.
fn power_of(text: &str) -> Option<i64> {
    let (is_negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let power = digits.bytes().fold(0i64, |sum, digit| (sum * 10 + i64::from(digit - b'0')).min(1_000_000));
    Some(if is_negative { -power } else { power })
}

/// A natural number of arbitrary size: 32-bit words, low words first, without leading zero words.
#[derive(Clone, Debug, Default)]
struct Big {
    words: Vec<u32>,
}

impl Big {
    fn from_u64(number: u64) -> Big {
        Big { words: vec![number as u32, (number >> 32) as u32] }.trimmed()
    }

    fn trimmed(mut self) -> Big {
        while self.words.last() == Some(&0) {
            self.words.pop();
        }
        self
    }

    fn is_zero(&self) -> bool {
        self.words.is_empty()
    }

    fn bits(&self) -> usize {
        self.words.last().map_or(0, |top| self.words.len() * 32 - top.leading_zeros() as usize)
    }

    fn multiply_add(&mut self, factor: u32, add: u32) {
        let mut carry = u64::from(add);
        for word in &mut self.words {
            carry += u64::from(*word) * u64::from(factor);
            *word = carry as u32;
            carry >>= 32;
        }
        if carry > 0 {
            self.words.push(carry as u32);
        }
    }

    fn power_of_ten(power: usize) -> Big {
        let mut number = Big { words: vec![1] };
        for _ in 0..power / 9 {
            number.multiply_add(1_000_000_000, 0);
        }
        number.multiply_add(10u32.pow((power % 9) as u32), 0);
        number
    }

    fn times(&self, other: &Big) -> Big {
        let mut words = vec![0u32; self.words.len() + other.words.len()];
        for (at, a) in self.words.iter().enumerate() {
            let mut carry = 0u64;
            for (offset, b) in other.words.iter().enumerate() {
                carry += u64::from(*a) * u64::from(*b) + u64::from(words[at + offset]);
                words[at + offset] = carry as u32;
                carry >>= 32;
            }
            words[at + other.words.len()] = carry as u32;
        }
        Big { words }.trimmed()
    }

    fn shifted(&self, by: usize) -> Big {
        let mut words = vec![0; by / 32];
        let (left, mut carry) = (by % 32, 0u64);
        for word in &self.words {
            carry |= u64::from(*word) << left;
            words.push(carry as u32);
            carry >>= 32;
        }
        words.push(carry as u32);
        Big { words }.trimmed()
    }

    fn is_at_least(&self, other: &Big) -> bool {
        let (a, b) = (&self.words, &other.words);
        a.len() > b.len() || a.len() == b.len() && a.iter().rev().ge(b.iter().rev())
    }

    fn subtract(&mut self, other: &Big) {
        let mut borrow = false;
        for (at, word) in self.words.iter_mut().enumerate() {
            let (first, one) = word.overflowing_sub(other.words.get(at).copied().unwrap_or(0));
            let (second, two) = first.overflowing_sub(u32::from(borrow));
            (*word, borrow) = (second, one || two);
        }
        *self = std::mem::take(self).trimmed();
    }

    /// The quotient, which must fit into 96 bits, and whether there is a remainder.
    fn divided(&self, by: &Big) -> (Big, bool) {
        let (mut rest, mut quotient) = (self.clone(), 0u128);
        for bit in (0..96).rev() {
            let part = by.shifted(bit);
            if rest.is_at_least(&part) {
                rest.subtract(&part);
                quotient |= 1 << bit;
            }
        }
        let words = (0..4).map(|at| (quotient >> (32 * at)) as u32).collect();
        (Big { words }.trimmed(), !rest.is_zero())
    }

    fn round(&self, is_negative: bool) -> Extended {
        self.round_with(is_negative, 0, false)
    }

    /// The float nearest to this times `2^exponent`, with a sticky bit.
    fn round_with(&self, is_negative: bool, exponent: i32, has_more: bool) -> Extended {
        // The top 128 bits decide, with a sticky bit for the rest.
        let skip = self.words.len().saturating_sub(4);
        let has_more = has_more || self.words[..skip].iter().any(|word| *word != 0);
        let top = self.words[skip..].iter().rev().fold(0u128, |sum, word| sum << 32 | u128::from(*word));
        Extended::round(is_negative, top, exponent + 32 * skip as i32, has_more)
    }

    fn decimal(mut self) -> String {
        let mut parts = Vec::new();
        while !self.is_zero() {
            let mut rest = 0u64;
            for word in self.words.iter_mut().rev() {
                rest = rest << 32 | u64::from(*word);
                *word = (rest / 1_000_000_000) as u32;
                rest %= 1_000_000_000;
            }
            parts.push(rest);
            self = self.trimmed();
        }
        let mut text = parts.pop().unwrap_or(0).to_string();
        parts.iter().rev().for_each(|part| text.push_str(&format!("{part:09}")));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(left: &str, right: &str) -> String {
        Extended::parse(left).unwrap().plus(Extended::parse(right).unwrap()).format()
    }

    #[test]
    fn sums_match_long_double_digits() {
        // Replies of redis-server 7.0.15 on x86-64.
        for (left, right, wanted) in [
            ("1", "0.1", "1.1"),
            ("1.1", "1e30", "1000000000000000000024696061952"),
            ("1", "1.123456789012345678901", "2.12345678901234568"),
            ("5.0e3", "1.2e-5", "5000.0000119999999999"),
            ("0.1", "0.2", "0.3"),
            ("0.3", "0.00000000000000000001", "0.3"),
            ("1e17", "0.5", "100000000000000000.5"),
            ("0.3", "1e20", "100000000000000000000"),
            ("1", "-1.1", "-0.1"),
            ("-0.1", "0.1", "0"),
            ("10.5", "0.1", "10.6"),
            ("10.6", "-10.6", "0"),
            ("3", "1.000000000005", "4.000000000005"),
            ("17179869184", "1", "17179869185"),
            ("0", "0.25", "0.25"),
            ("18446744073709551615", "1", "18446744073709551616"),
            ("18446744073709551616", "1", "18446744073709551616"),
            ("18446744073709551616", "3", "18446744073709551620"),
            ("1e-30", "0", "0"),
        ] {
            assert_eq!(sum(left, right), wanted, "{left} + {right}");
        }
    }

    #[test]
    fn invalid_numbers_are_rejected() {
        for text in ["", ".", "-", "1e", "1x", "e5", "1e+", "0x10", "1e5000", "1e-5000", "1 "] {
            assert_eq!(Extended::parse(text), None, "{text}");
        }
        assert_eq!(Extended::parse("0e99999"), Some(Extended::ZERO));
        assert_eq!(Extended::from_f64(0.75), Extended::parse("0.75").unwrap());
        assert_eq!(Extended::from_f64(-3e-310), Extended::from_f64(-3e-310));
    }
}
