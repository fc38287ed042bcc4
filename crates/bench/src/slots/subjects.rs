//! The subjects of the store's metrics: each server under each load.

use std::time::Duration;

use anyhow::Result;

use super::{Bench, Running};
use crate::load::Until;
use crate::load::slots::{self as loads, Load};
use crate::slices::{Subject, Work};

/// A server under one kind of command.
pub(super) struct LoadSubject<'a> {
    pub(super) bench: &'a Bench<'a>,
    pub(super) server: &'a Running,
    pub(super) load: Load,
}

impl Subject for LoadSubject<'_> {
    fn label(&self) -> String {
        self.server.label.into()
    }

    fn durability(&self) -> String {
        self.server.durability.into()
    }

    fn pid(&self) -> Option<u32> {
        Some(self.server.child.id())
    }

    fn run(&mut self, slice: Duration) -> Result<Work> {
        self.bench.runtime.block_on(loads::run(self.server.addr, self.load, Until::Elapsed(slice)))
    }

    fn settle(&mut self) -> Result<()> {
        rustix::fs::sync();
        Ok(())
    }
}

/// Reads from a server under concurrent writes.
pub(super) struct BesideSubject<'a> {
    pub(super) bench: &'a Bench<'a>,
    pub(super) server: &'a Running,
    pub(super) clients: usize,
}

impl Subject for BesideSubject<'_> {
    fn label(&self) -> String {
        self.server.label.into()
    }

    fn durability(&self) -> String {
        self.server.durability.into()
    }

    fn pid(&self) -> Option<u32> {
        Some(self.server.child.id())
    }

    fn run(&mut self, slice: Duration) -> Result<Work> {
        let load = loads::reads_beside_writes(self.server.addr, self.clients, Until::Elapsed(slice));
        self.bench.runtime.block_on(load)
    }

    fn settle(&mut self) -> Result<()> {
        rustix::fs::sync();
        Ok(())
    }
}
