//! The subjects of the coordination metrics: each server under each load.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::{Bench, Running};
use crate::load::Until;
use crate::load::coord::{self as loads, Watchers};
use crate::slices::{Subject, Work};

/// Interval between two updates of the fan-out.
const UPDATE_INTERVAL: Duration = Duration::from_millis(100);

/// A server, independent of the load.
struct Server<'a> {
    bench: &'a Bench<'a>,
    label: &'static str,
    addr: SocketAddr,
    pid: u32,
}

impl<'a> Server<'a> {
    fn new(bench: &'a Bench<'a>, running: &Running) -> Result<Server<'a>> {
        let pid = running.cluster.pids().first().copied().context("a server without a process")?;
        Ok(Server { bench, label: running.label, addr: running.addr(0)?, pid })
    }
}

/// Puts by many clients.
pub(super) struct PutSubject<'a> {
    server: Server<'a>,
    clients: usize,
}

impl<'a> PutSubject<'a> {
    pub(super) fn new(bench: &'a Bench<'a>, running: &Running, clients: usize) -> Result<PutSubject<'a>> {
        Ok(PutSubject { server: Server::new(bench, running)?, clients })
    }
}

impl Subject for PutSubject<'_> {
    fn label(&self) -> String {
        self.server.label.into()
    }

    fn durability(&self) -> String {
        "fsync".into()
    }

    fn pid(&self) -> Option<u32> {
        Some(self.server.pid)
    }

    fn run(&mut self, slice: Duration) -> Result<Work> {
        let load = loads::puts(self.server.addr, self.clients, Until::Elapsed(slice));
        self.server.bench.runtime.block_on(load)
    }

    fn settle(&mut self) -> Result<()> {
        rustix::fs::sync();
        Ok(())
    }
}

/// Linearizable gets by many clients.
pub(super) struct GetSubject<'a> {
    server: Server<'a>,
    clients: usize,
}

impl<'a> GetSubject<'a> {
    pub(super) fn new(bench: &'a Bench<'a>, running: &Running, clients: usize) -> Result<GetSubject<'a>> {
        Ok(GetSubject { server: Server::new(bench, running)?, clients })
    }
}

impl Subject for GetSubject<'_> {
    fn label(&self) -> String {
        self.server.label.into()
    }

    fn durability(&self) -> String {
        "linearizable".into()
    }

    fn pid(&self) -> Option<u32> {
        Some(self.server.pid)
    }

    fn run(&mut self, slice: Duration) -> Result<Work> {
        let load = loads::gets(self.server.addr, self.clients, Until::Elapsed(slice));
        self.server.bench.runtime.block_on(load)
    }
}

/// Watchers of one key that is updated at a fixed rate.
pub(super) struct WatchSubject<'a> {
    server: Server<'a>,
    count: usize,
    watchers: Option<Watchers>,
}

impl<'a> WatchSubject<'a> {
    pub(super) fn new(bench: &'a Bench<'a>, running: &Running, count: usize) -> Result<WatchSubject<'a>> {
        Ok(WatchSubject { server: Server::new(bench, running)?, count, watchers: None })
    }
}

impl Subject for WatchSubject<'_> {
    fn label(&self) -> String {
        self.server.label.into()
    }

    fn durability(&self) -> String {
        "fsync".into()
    }

    fn pid(&self) -> Option<u32> {
        Some(self.server.pid)
    }

    fn prepare(&mut self) -> Result<()> {
        let create = Watchers::create(self.server.addr, self.count);
        self.watchers = Some(self.server.bench.runtime.block_on(create)?);
        Ok(())
    }

    fn run(&mut self, slice: Duration) -> Result<Work> {
        let watchers = self.watchers.as_mut().context("the watchers are there")?;
        self.server.bench.runtime.block_on(watchers.run(slice, UPDATE_INTERVAL))
    }

    fn settle(&mut self) -> Result<()> {
        self.watchers = None;
        Ok(())
    }
}
