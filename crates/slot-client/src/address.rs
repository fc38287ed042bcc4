//! Server addresses as written by users, redirections and CLUSTER NODES.

use std::fmt;

use crate::error::Error;

/// A host (name or address) and a port.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address {
    /// A host name, an IPv4 address, or an IPv6 address without brackets.
    pub host: String,
    /// The port.
    pub port: u16,
}

impl Address {
    /// An address.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self { host: host.into(), port }
    }

    /// Parses `host:port`, `[v6]:port` or `v6:port`; the last colon separates the port. `None` without a
    /// port.
    pub fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        Some(Self::new(host, port.parse().ok()?))
    }

    /// Fills an empty host with `host`: the server does not know its own name, so the host name of the
    /// connection is used.
    pub(crate) fn or_host(mut self, host: &str) -> Self {
        if self.host.is_empty() || self.host == "?" {
            host.clone_into(&mut self.host);
        }
        self
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// A seed: address and credentials.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Seed {
    pub(crate) address: Address,
    pub(crate) username: Option<String>,
    pub(crate) password: Option<String>,
}

impl Seed {
    /// Parses `host`, `host:port` or `redis://[user[:password]@]host[:port]`.
    pub(crate) fn parse(text: &str) -> Result<Self, Error> {
        let bad = || {
            Error::Config(format!(
                "`{text}` is no address: write host:port or redis://user:password@host:port"
            ))
        };
        let rest = match text.split_once("://") {
            Some(("redis", rest)) => rest.trim_end_matches('/'),
            Some(_) => return Err(bad()),
            None => text,
        };
        let (user, place) = match rest.rsplit_once('@') {
            Some((user, address)) => (Some(user), address),
            None => (None, rest),
        };
        let (username, password) = match user.map(|user| user.split_once(':').unwrap_or(("", user))) {
            Some((name, password)) => {
                ((!name.is_empty()).then(|| name.to_owned()), Some(password.to_owned()))
            }
            None => (None, None),
        };
        let address = match Address::parse(place) {
            Some(address) => address,
            None if !place.contains(':') => Address::new(place, 6379),
            None => return Err(bad()),
        };
        if address.host.is_empty() {
            return Err(bad());
        }
        Ok(Self { address, username, password })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_forms_are_parsed() {
        for (text, host, port) in [
            ("10.0.0.1:6379", "10.0.0.1", 6379),
            ("::1:7000", "::1", 7000),
            ("[fe80::1]:7001", "fe80::1", 7001),
            (":7002", "", 7002),
        ] {
            assert_eq!(Address::parse(text), Some(Address::new(host, port)), "{text}");
        }
        assert_eq!((Address::parse("nothing"), Address::parse("a:99999")), (None, None));
        assert_eq!(Address::new("::1", 1).to_string(), "[::1]:1");
        assert_eq!(Address::parse(":7002").unwrap().or_host("a"), Address::new("a", 7002));
    }

    #[test]
    fn seeds_carry_credentials() {
        let seed = |text| Seed::parse(text).map(|seed| (seed.address, seed.username, seed.password)).ok();
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(seed("h"), Some((Address::new("h", 6379), None, None)));
        assert_eq!(seed("redis://h:1/"), Some((Address::new("h", 1), None, None)));
        assert_eq!(seed("redis://:pw@h:1"), Some((Address::new("h", 1), None, text("pw"))));
        assert_eq!(seed("redis://u:p@w@h"), Some((Address::new("h", 6379), text("u"), text("p@w"))));
        assert_eq!((seed("http://h:1"), seed("h:x"), seed(":1")), (None, None, None));
    }
}
