//! The real etcd, for comparisons: the installed one, and 3.5 from Go's module proxy if Go is installed.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Version of the built etcd.
const VERSION: &str = "3.5.35";

/// An `etcd` on the path.
pub(crate) fn installed() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join("etcd")).find(|file| file.is_file())
}

/// etcd 3.5 below `home`, built once. The error names what is missing.
pub(crate) fn built(home: &Path) -> Result<PathBuf> {
    let dir = home.join(format!("etcd-{VERSION}"));
    let program = dir.join("etcd");
    if program.is_file() {
        return Ok(program);
    }
    std::fs::create_dir_all(&dir).context("the folder for etcd")?;
    let module = format!("go.etcd.io/etcd/server/v3@v{VERSION}");
    // Built through a wrapper module: the server's own go.mod has replacements that the proxy does not have.
    let steps: [&[&str]; 3] =
        [&["mod", "init", "peer"], &["get", &module], &["build", "-o", "etcd", "go.etcd.io/etcd/server/v3"]];
    for step in steps {
        if step[0] == "mod" && dir.join("go.mod").exists() {
            continue;
        }
        let log = std::fs::File::create(dir.join("go.log")).context("a log")?;
        let status = Command::new("go")
            .args(step)
            .env("GOFLAGS", "-mod=mod")
            .current_dir(&dir)
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("a log")?)
            .stderr(log)
            .status()
            .context("go is not installed")?;
        if !status.success() {
            bail!("go {} failed; see {}", step.join(" "), dir.join("go.log").display());
        }
    }
    Ok(program)
}
