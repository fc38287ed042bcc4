//! Scripts: EVALSHA, with a fallback to EVAL on NOSCRIPT.

use std::fmt::Write;

use sha1::{Digest, Sha1};

use crate::client::Client;
use crate::command::{Arg, Cmd, cmd};
use crate::convert::FromValue;
use crate::error::Error;

/// A Lua script.
#[derive(Clone, Debug)]
pub struct Script {
    text: String,
    digest: String,
}

impl Script {
    /// A script. Its SHA-1 digest is computed once, here.
    pub fn new(text: impl Into<String>) -> Self {
        let text = text.into();
        let mut digest = String::with_capacity(40);
        for byte in Sha1::digest(text.as_bytes()) {
            // Writing into a string cannot fail.
            let _ = write!(digest, "{byte:02x}");
        }
        Self { text, digest }
    }

    /// SHA-1 of the text, for EVALSHA.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// EVALSHA with these keys and arguments, for pipelines and transactions. The nodes must have loaded the
    /// script: see [`Client::load_script`].
    pub fn call<K: Arg>(&self, keys: impl IntoIterator<Item = K>, args: impl Arg) -> Cmd {
        fill(cmd("EVALSHA").arg(&self.digest), keys, args)
    }
}

fn fill<K: Arg>(command: Cmd, keys: impl IntoIterator<Item = K>, args: impl Arg) -> Cmd {
    let mut names = cmd("");
    let mut count = 0u32;
    for key in keys {
        key.write_to(&mut names);
        count += 1;
    }
    let mut command = command.arg(count);
    names.args().for_each(|key| command.push(key));
    command.arg(args)
}

impl Client {
    /// Runs a script on keys of one slot.
    pub async fn eval<T: FromValue, K: Arg>(
        &self,
        script: &Script,
        keys: impl IntoIterator<Item = K>,
        args: impl Arg,
    ) -> Result<T, Error> {
        let call = script.call(keys, args);
        let whole = call.clone();
        match self.run(call).await {
            Err(error) if error.code() == Some("NOSCRIPT") => {
                let mut command = cmd("EVAL").arg(&script.text);
                whole.args().skip(2).for_each(|arg| command.push(arg));
                self.run(command).await
            }
            result => result,
        }
    }

    /// Loads a script on every node.
    pub async fn load_script(&self, script: &Script) -> Result<(), Error> {
        self.run(cmd("SCRIPT LOAD").arg(&script.text)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn script_is_called_by_its_digest() {
        let script = Script::new("return 1");
        assert_eq!(script.digest(), "e0e1f9fabfc9d4800c877a703b823ac0578ff8db");
        let call = script.call(["{a}1", "{a}2"], (5, "x"));
        assert_eq!(
            format!("{call:?}"),
            format!("[\"EVALSHA\", \"{}\", \"2\", \"{{a}}1\", \"{{a}}2\", \"5\", \"x\"]", script.digest())
        );
    }
}
