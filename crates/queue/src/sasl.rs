//! SASL PLAIN authentication, on nodes with users.
//!
//! A node without users requires no authentication. With users, a connection may only send ApiVersions and
//! authenticate until it has; frames are small until then, and a wrong password closes the connection. PLAIN sends
//! the password in clear text, so beyond one machine it needs a network that is safe from eavesdropping.

use std::collections::BTreeMap;

/// Supported SASL mechanisms.
pub(crate) const MECHANISMS: [&str; 1] = ["PLAIN"];
/// Maximum frame size before authentication.
pub(crate) const UNKNOWN_MAX_FRAME: usize = 64 << 10;

/// The users of a node and their passwords.
#[derive(Clone, Default)]
pub struct Users(BTreeMap<String, String>);

impl std::fmt::Debug for Users {
    /// Prints names only, because debug output ends up in logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// A user list that cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: a user is `name:password`, both not empty")]
pub struct UsersError {
    line: usize,
}

impl Users {
    /// Parses `name:password` lines; empty lines and lines that begin with `#` are skipped.
    pub fn parse(text: &str) -> Result<Self, UsersError> {
        let mut users = BTreeMap::new();
        for (i, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let parts =
                line.split_once(':').filter(|(name, password)| !name.is_empty() && !password.is_empty());
            let (name, password) = parts.ok_or(UsersError { line: i + 1 })?;
            users.insert(name.to_owned(), password.to_owned());
        }
        Ok(Self(users))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The PLAIN token of the first user; `None` without authentication.
    pub(crate) fn token(&self) -> Option<bytes::Bytes> {
        let (name, password) = self.0.first_key_value()?;
        Some(bytes::Bytes::from(format!("\0{name}\0{password}")))
    }

    /// Returns the user of a valid PLAIN token: `[authorization id] NUL name NUL password`.
    fn check(&self, token: &[u8]) -> Option<String> {
        let mut parts = token.split(|byte| *byte == 0);
        let (acting_as, name, password) = (parts.next()?, parts.next()?, parts.next()?);
        if parts.next().is_some() || !(acting_as.is_empty() || acting_as == name) {
            return None;
        }
        let name = std::str::from_utf8(name).ok()?;
        // Constant time: an unknown name takes as long as a wrong password.
        let known = self.0.get(name);
        let expected = known.map_or("\0", String::as_str);
        (same(expected.as_bytes(), password) && known.is_some()).then(|| name.to_owned())
    }
}

/// Compares two secrets in constant time.
fn same(a: &[u8], b: &[u8]) -> bool {
    let mut difference = a.len() ^ b.len();
    for (i, byte) in b.iter().enumerate() {
        difference |= usize::from(byte ^ a.get(i).copied().unwrap_or(0));
    }
    difference == 0
}

/// The authentication state of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Auth {
    /// The node has no users.
    NotNeeded,
    /// No handshake yet.
    Unknown,
    /// PLAIN was selected; the token comes in SaslAuthenticate, or (`raw`, after handshake version 0) as a bare
    /// frame.
    Chosen { raw: bool },
    /// Authenticated as this user.
    Known(String),
}

impl Auth {
    pub(crate) fn new(users: &Users) -> Self {
        if users.is_empty() { Self::NotNeeded } else { Self::Unknown }
    }

    pub(crate) fn is_open(&self) -> bool {
        matches!(self, Self::NotNeeded | Self::Known(_))
    }

    /// Checks a token; true if it has a user's name and password.
    pub(crate) fn authenticate(&mut self, users: &Users, token: &[u8]) -> bool {
        match users.check(token) {
            Some(user) => {
                *self = Self::Known(user);
                true
            }
            None => {
                *self = Self::Unknown;
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_right_password_authenticates() {
        let users = Users::parse("# people\nalice:s3cret\n\nbob:a:b\n").unwrap();
        for (token, user) in [
            (&b"\0alice\0s3cret"[..], Some("alice")),
            (b"alice\0alice\0s3cret", Some("alice")),
            (b"\0bob\0a:b", Some("bob")),
            (b"bob\0alice\0s3cret", None),
            (b"\0alice\0s3cre", None),
            (b"\0alice\0s3cret!", None),
            (b"\0alice\0", None),
            (b"\0mallory\0\0", None),
            (b"\0mallory\0", None),
            (b"", None),
            (b"\0alice\0s3cret\0", None),
            (b"\0\xff\0x", None),
        ] {
            assert_eq!(users.check(token).as_deref(), user, "{token:?}");
        }
    }

    #[test]
    fn malformed_line_is_reported_and_passwords_are_not_printed() {
        assert_eq!(Users::parse("alice:x\nbob\n").unwrap_err(), UsersError { line: 2 });
        assert_eq!(format!("{:?}", Users::parse("alice:s3cret").unwrap()), r#"{"alice"}"#);
    }
}
