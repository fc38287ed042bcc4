//! Client authentication: a client is authentic under its name if it knows the shared secret of the run.
//!
//! The secret is a file of 32 random bytes in hexadecimal, created by `moim pipeline` and readable by its owner
//! alone. It is never transmitted: the client proves it with an HMAC over both sides' nonces, its name and its
//! incarnation.

use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use hmac::{Hmac, Mac};
use sha2::Sha256;

/// The secret shared by clients and gateways.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    /// Generates a random secret.
    pub fn random() -> io::Result<Self> {
        Ok(Self(random()?))
    }

    /// Reads the secret; creates the file if it does not exist.
    pub fn load_or_create(path: &Path) -> io::Result<Self> {
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(text.trim()).ok_or_else(|| {
                let why = format!("{}: not a secret (64 hexadecimal digits)", path.display());
                io::Error::new(io::ErrorKind::InvalidData, why)
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let secret = Self::random()?;
                if let Some(folder) = path.parent() {
                    std::fs::create_dir_all(folder)?;
                }
                let mut file =
                    std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
                let text: String = secret.0.iter().map(|byte| format!("{byte:02x}")).collect();
                writeln!(file, "{text}")?;
                file.sync_all()?;
                Ok(secret)
            }
            Err(error) => Err(error),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return None;
        }
        let mut secret = [0; 32];
        for (byte, pair) in secret.iter_mut().zip(digits.chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Self(secret))
    }

    /// The HMAC that the client sends.
    pub fn prove(&self, claim: &Claim<'_>) -> [u8; 32] {
        self.mac(claim).finalize().into_bytes().into()
    }

    /// Verifies an HMAC in constant time.
    pub fn is_proof(&self, claim: &Claim<'_>, mac: &[u8; 32]) -> bool {
        self.mac(claim).verify_slice(mac).is_ok()
    }

    fn mac(&self, claim: &Claim<'_>) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        mac.update(b"moim pipeline 1");
        mac.update(claim.gateway_nonce);
        mac.update(claim.client_nonce);
        mac.update(&claim.incarnation.to_be_bytes());
        mac.update(claim.client.as_bytes());
        mac
    }
}

/// The values that a proof covers.
pub struct Claim<'a> {
    /// The client's name.
    pub client: &'a str,
    /// The client's incarnation.
    pub incarnation: u64,
    /// The client's nonce.
    pub client_nonce: &'a [u8; 16],
    /// The gateway's nonce.
    pub gateway_nonce: &'a [u8; 16],
}

/// Cryptographically secure random bytes.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proof_is_valid_for_its_own_claim_only() {
        let secret = Secret::random().unwrap();
        let claim = Claim { client: "a", incarnation: 1, client_nonce: &[1; 16], gateway_nonce: &[2; 16] };
        let mac = secret.prove(&claim);
        assert!(secret.is_proof(&claim, &mac));
        assert!(!secret.is_proof(&Claim { client: "b", ..claim }, &mac));
        assert!(!secret.is_proof(&Claim { incarnation: 2, ..claim }, &mac));
        assert!(!secret.is_proof(&Claim { gateway_nonce: &[3; 16], ..claim }, &mac));
        assert!(!Secret::random().unwrap().is_proof(&claim, &mac));
    }

    #[test]
    fn secret_file_is_created_once_and_readable_by_its_owner_only() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/token");
        let made = Secret::load_or_create(&path).unwrap();
        assert_eq!(made.0, Secret::load_or_create(&path).unwrap().0);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::write(&path, "short").unwrap();
        assert!(Secret::load_or_create(&path).is_err());
    }
}
