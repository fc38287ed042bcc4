//! Wall clock steps: an LD_PRELOAD library adds an offset to the wall clock of one process. The monotonic clocks are
//! unchanged.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

const SOURCE: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile long long *step_s;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("STORM_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        void *page = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
        if (page != MAP_FAILED) step_s = page;
        close(file);
    }
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, now);
    if (!failed && step_s && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *step_s;
    return failed;
}
"#;

/// The clock offset of each node.
pub(super) struct Clocks {
    folder: tempfile::TempDir,
}

impl Clocks {
    /// Builds the library. `None` without a C compiler.
    pub(super) fn make(nodes: usize) -> Option<Self> {
        let folder = tempfile::tempdir().ok()?;
        let source = folder.path().join("clock.c");
        std::fs::write(&source, SOURCE).ok()?;
        let library = folder.path().join("clock.so");
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .arg(&library)
            .arg(&source)
            .arg("-ldl")
            .output()
            .ok()?;
        compiled.status.success().then_some(())?;
        let clocks = Self { folder };
        for node in 0..nodes {
            std::fs::write(clocks.file(node), 0_i64.to_le_bytes()).ok()?;
        }
        Some(clocks)
    }

    fn file(&self, node: usize) -> PathBuf {
        self.folder.path().join(format!("clock-{node}"))
    }

    /// Environment variables that make a process use this clock.
    pub(super) fn env(&self, node: usize) -> [(String, String); 2] {
        let text = |path: PathBuf| path.display().to_string();
        [
            ("LD_PRELOAD".to_owned(), text(self.folder.path().join("clock.so"))),
            ("STORM_CLOCK".to_owned(), text(self.file(node))),
        ]
    }

    /// Sets a node's wall clock to this many seconds ahead of, or behind, the real time.
    pub(super) fn step(&self, node: usize, seconds: i64) {
        let file = File::options().write(true).open(self.file(node)).unwrap();
        file.write_all_at(&seconds.to_le_bytes(), 0).unwrap();
    }
}

#[test]
fn wall_clock_of_a_process_steps() {
    let Some(clocks) = Clocks::make(1) else { return moim_base::require::skip("cc", "no C compiler") };
    let year = || {
        let date = Command::new("date").args(["-u", "+%Y"]).envs(clocks.env(0)).output().unwrap();
        String::from_utf8_lossy(&date.stdout).trim().parse::<i32>().unwrap()
    };
    let now = year();
    clocks.step(0, Duration::from_secs(800 * 86_400).as_secs().cast_signed());
    assert!(year() > now);
    clocks.step(0, -1_000 * 86_400);
    assert!(year() < now);
}
