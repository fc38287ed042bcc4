//! CRC-64 with the polynomial of Redis (Jones), reflected, eight bytes at a time.

/// The polynomial, bits reversed.
const POLYNOMIAL: u64 = 0x95ac_9329_ac4b_c9b5;

const TABLES: [[u64; 256]; 8] = tables();

const fn tables() -> [[u64; 256]; 8] {
    let mut tables = [[0u64; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut sum = byte as u64;
        let mut bit = 0;
        while bit < 8 {
            sum = if sum & 1 == 1 { (sum >> 1) ^ POLYNOMIAL } else { sum >> 1 };
            bit += 1;
        }
        tables[0][byte] = sum;
        byte += 1;
    }
    let mut table = 1;
    while table < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[table - 1][byte];
            tables[table][byte] = (before >> 8) ^ tables[0][(before & 0xff) as usize];
            byte += 1;
        }
        table += 1;
    }
    tables
}

/// Updates the checksum `sum` (0 initially) with `bytes`.
pub fn crc64(mut sum: u64, bytes: &[u8]) -> u64 {
    let mut words = bytes.chunks_exact(8);
    for word in &mut words {
        let word = word.try_into().map_or(0, u64::from_le_bytes) ^ sum;
        sum = 0;
        for (place, table) in TABLES.iter().rev().enumerate() {
            sum ^= table[(word >> (8 * place)) as usize & 0xff];
        }
    }
    for &byte in words.remainder() {
        sum = (sum >> 8) ^ TABLES[0][((sum ^ u64::from(byte)) & 0xff) as usize];
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn has_the_known_check_value() {
        assert_eq!(crc64(0, b"123456789"), 0xe9c6_d914_c4b8_d9ca);
        let (left, right) = (b"The quick brown fox", b" jumps over the lazy dog");
        assert_eq!(crc64(crc64(0, left), right), crc64(0, &[&left[..], right].concat()));
    }
}
