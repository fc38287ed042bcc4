//! Function libraries of a shard: their code and the metadata of the registered functions.
//!
//! They belong to the keyspace: loading and deleting are effects, snapshots contain the code, and replay loads it
//! again. Pure: the code runs elsewhere (`script/library.rs`), and again on every thread that calls it.
//!
//! Invariant: a function name belongs to one library only, ignoring case.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::Error;
use crate::rdb;

/// Function flags: bits, with the names used by scripts and clients.
pub(crate) const FLAGS: [(u8, &str); 5] = [
    (1, "no-writes"),
    (2, "allow-oom"),
    (4, "allow-stale"),
    (8, "no-cluster"),
    (16, "allow-cross-slot-keys"),
];
/// `no-writes`: the function may not write.
pub(crate) const NO_WRITES: u8 = 1;
/// `allow-oom`: the function may run above `maxmemory`.
pub(crate) const ALLOW_OOM: u8 = 2;
/// `no-cluster`: the function does not run in cluster mode, so never here.
pub(crate) const NO_CLUSTER: u8 = 8;

/// Metadata of a registered function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct About {
    pub(crate) description: Option<String>,
    pub(crate) flags: u8,
}

/// A function library.
#[derive(Clone, Debug)]
pub(crate) struct Library {
    pub(crate) name: String,
    /// The complete code, including the shebang line.
    pub(crate) code: Arc<[u8]>,
    /// SHA-1 digest of the code.
    pub(crate) sha: String,
    pub(crate) functions: BTreeMap<String, About>,
}

impl Library {
    /// The name under which this library registered a function, matched ignoring case.
    fn own_name(&self, function: &str) -> Option<&str> {
        if let Some((name, _)) = self.functions.get_key_value(function) {
            return Some(name);
        }
        self.functions.keys().find(|name| name.eq_ignore_ascii_case(function)).map(String::as_str)
    }
}

/// All libraries of a shard.
#[derive(Clone, Debug, Default)]
pub struct Functions {
    libraries: BTreeMap<String, Arc<Library>>,
}

impl Functions {
    /// The libraries in the order of their names.
    pub(crate) fn libraries(&self) -> impl ExactSizeIterator<Item = &Arc<Library>> {
        self.libraries.values()
    }

    /// The library of a function and the registered name; callers may use any case.
    pub(crate) fn find(&self, function: &str) -> Option<(&Arc<Library>, &str)> {
        self.libraries.values().find_map(|library| Some((library, library.own_name(function)?)))
    }

    /// Number of functions.
    pub(crate) fn len(&self) -> usize {
        self.libraries.values().map(|library| library.functions.len()).sum()
    }

    /// Adds a library. With `replaces` an existing library of the same name is replaced; a function name of another
    /// library is an error.
    pub(crate) fn add(&mut self, library: Library, replaces: bool) -> Result<(), Error> {
        if !replaces && self.libraries.contains_key(&library.name) {
            return Err(Error::err(format_args!("Library '{}' already exists", library.name)));
        }
        let others =
            |function: &&String| self.find(function).is_some_and(|(other, _)| other.name != library.name);
        if let Some(taken) = library.functions.keys().find(others) {
            return Err(Error::err(format_args!("Function {taken} already exists")));
        }
        self.libraries.insert(library.name.clone(), Arc::new(library));
        Ok(())
    }

    /// Removes a library. Returns whether it existed.
    pub(crate) fn remove(&mut self, name: &str) -> bool {
        self.libraries.remove(name).is_some()
    }

    /// The FUNCTION DUMP payload of all libraries.
    pub(crate) fn payload(&self) -> Vec<u8> {
        rdb::dump_functions(self.libraries().map(|library| &*library.code))
    }
}

/// Validates a name: letters, digits and underscores.
pub(crate) fn check_name(name: &str) -> Result<(), Error> {
    let fits = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    fits.then_some(()).ok_or_else(|| {
        Error::err(
            "Library names can only contain letters, numbers, or underscores(_) and must be at least one character long",
        )
    })
}

/// Parses the shebang line: returns the library name and the code after that line, including its line end.
pub(crate) fn metadata(code: &[u8]) -> Result<(String, &[u8]), Error> {
    let rest = code.strip_prefix(b"#!").ok_or_else(|| Error::err("Missing library metadata"))?;
    let end = rest.iter().position(|byte| *byte == b'\n');
    let end = end.ok_or_else(|| Error::err("Invalid library metadata"))?;
    let line = String::from_utf8_lossy(&rest[..end]).into_owned();
    let mut words = line.split_whitespace();
    let engine = words.next().unwrap_or_default();
    let mut name = None;
    for word in words {
        let is_name = word.get(..5).is_some_and(|start| start.eq_ignore_ascii_case("name="));
        if !is_name {
            return Err(Error::err(format_args!("Invalid metadata value given: {word}")));
        }
        if name.replace(word[5..].to_owned()).is_some() {
            return Err(Error::err("Invalid metadata value, name argument was given multiple times"));
        }
    }
    let name = name.ok_or_else(|| Error::err("Library name was not given"))?;
    check_name(&name)?;
    if !engine.eq_ignore_ascii_case("lua") {
        return Err(Error::err(format_args!("Engine '{engine}' not found")));
    }
    Ok((name, &rest[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shebang_line_names_the_library() {
        let name = |code: &str| metadata(code.as_bytes()).map(|(name, _)| name);
        assert_eq!(name("#!lua name=a_1\nx"), Ok("a_1".to_owned()));
        assert_eq!(metadata(b"#!LUA name=a\nx").unwrap().1, b"\nx");
        for (code, wanted) in [
            ("x", "ERR Missing library metadata"),
            ("#!lua name=a", "ERR Invalid library metadata"),
            ("#!lua\n", "ERR Library name was not given"),
            ("#!lua name=a name=b\n", "ERR Invalid metadata value, name argument was given multiple times"),
            ("#!lua foo=a\n", "ERR Invalid metadata value given: foo=a"),
            ("#!js name=a\n", "ERR Engine 'js' not found"),
        ] {
            assert_eq!(name(code).unwrap_err().0, wanted, "{code}");
        }
        assert!(name("#!lua name=a-b\n").is_err());
    }

    #[test]
    fn function_name_belongs_to_one_library() {
        let library = |name: &str, functions: &[&str]| Library {
            name: name.to_owned(),
            code: name.as_bytes().into(),
            sha: name.to_owned(),
            functions: functions.iter().map(|name| ((*name).to_owned(), About::default())).collect(),
        };
        let mut all = Functions::default();
        all.add(library("a", &["f", "g"]), false).unwrap();
        assert_eq!(all.add(library("a", &["f"]), false).unwrap_err().0, "ERR Library 'a' already exists");
        assert_eq!(all.add(library("b", &["g"]), false).unwrap_err().0, "ERR Function g already exists");
        all.add(library("a", &["f"]), true).unwrap();
        all.add(library("b", &["g"]), false).unwrap();
        assert_eq!((all.len(), all.find("g").unwrap().0.name.as_str()), (2, "b"));
        assert_eq!(all.find("G").map(|(_, name)| name), Some("g"), "names in any case");
        assert_eq!(all.add(library("c", &["G"]), false).unwrap_err().0, "ERR Function G already exists");
        assert!(all.remove("b") && !all.remove("b") && all.find("g").is_none());
    }
}
