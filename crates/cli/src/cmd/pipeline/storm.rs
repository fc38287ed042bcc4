//! The storm: kills, pauses and cut-offs of nodes and roles, several at once, all of it from one seed.
//!
//! Invariant: whatever was hit is whole again before the next blow, and when the storm is over.

use std::time::Duration;

use rustix::process::Signal;
use tokio::time::Instant;

use super::fault::Scene;
use super::stand::{pause, signal};
use crate::cmd::dev::wires;
use crate::exit::{Failure, Outcome, Status};
use crate::output::note;

/// How long a node may take to come back.
const PATIENCE: Duration = Duration::from_secs(60);

/// The target of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Target {
    Node(i32),
    /// By its index among the roles.
    Role(usize),
}

/// With what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blow {
    Kill,
    /// Its time stands still.
    Pause,
    /// Nothing gets to it, and nothing from it to others.
    Cut,
}

/// How often each blow fell.
#[derive(Clone, Copy, Debug, Default)]
struct Toll {
    kills: usize,
    pauses: usize,
    cuts: usize,
}

impl Scene {
    /// Hits at random for `lasting`.
    pub(super) async fn storm(&mut self, seed: u64, lasting: Duration) -> Outcome {
        let mut chance = fastrand::Rng::with_seed(seed);
        let mut toll = Toll::default();
        let until = Instant::now() + lasting;
        while Instant::now() < until {
            let hits = hits(&mut chance, self.roles.len(), self.stand.wires.is_some());
            let lasting_ms = chance.u64(200..3_000);
            let told: Vec<String> =
                hits.iter().map(|(target, blow)| format!("{} {}", self.name(*target), blow.told())).collect();
            note(format_args!("{}, for {lasting_ms} ms", told.join(", ")));
            for (target, blow) in &hits {
                toll.add(*blow);
                self.strike(*target, *blow).await?;
            }
            tokio::time::sleep(Duration::from_millis(lasting_ms)).await;
            self.heal(&hits).await?;
            tokio::time::sleep(Duration::from_millis(chance.u64(100..1_000))).await;
        }
        for role in &mut self.roles {
            if role.has_ended()? {
                return Err(Failure::error(format!("{} has ended by itself", role.role.name())));
            }
        }
        let Toll { kills, pauses, cuts } = toll;
        note(format_args!("the storm is over: {kills} kills, {pauses} pauses, {cuts} cut-offs"));
        Ok(())
    }

    fn name(&self, target: Target) -> String {
        match target {
            Target::Node(id) => format!("node-{id}"),
            Target::Role(at) => self.roles[at].role.name(),
        }
    }

    async fn strike(&mut self, target: Target, blow: Blow) -> Outcome {
        match (blow, target) {
            (Blow::Kill, Target::Node(id)) => self.stand.cluster.kill(id).await,
            (Blow::Kill, Target::Role(at)) => self.roles[at].kill().await,
            (Blow::Pause, _) => self.set_paused(target, true),
            (Blow::Cut, _) => match &self.stand.wires {
                Some(wires) => wires.cut(&self.namespace(target)),
                None => Ok(()),
            },
        }
    }

    /// Wires and time first: nodes that start again need the others.
    async fn heal(&mut self, hits: &[(Target, Blow)]) -> Outcome {
        for (target, blow) in hits {
            match (blow, &self.stand.wires) {
                (Blow::Cut, Some(wires)) => wires.mend(&self.namespace(*target))?,
                (Blow::Pause, _) => self.set_paused(*target, false)?,
                _ => {}
            }
        }
        let mut nodes = Vec::new();
        for (target, _) in hits.iter().filter(|(_, blow)| *blow == Blow::Kill) {
            match target {
                Target::Node(id) => nodes.push(*id),
                Target::Role(at) => self.roles[*at] = self.stand.spawn(self.roles[*at].role.clone())?,
            }
        }
        let starts = nodes.iter().map(|id| self.stand.cluster.restart(*id));
        let all = tokio::time::timeout(PATIENCE, futures_util::future::try_join_all(starts));
        let started = all.await.map_err(|_| {
            Failure::new(
                Status::Timeout,
                format!("nodes {nodes:?} did not come back in {} s", PATIENCE.as_secs()),
            )
        })?;
        started.map(drop)
    }

    fn namespace(&self, target: Target) -> String {
        match target {
            Target::Node(id) => wires::node(id).0,
            Target::Role(at) => self.roles[at].role.name(),
        }
    }

    fn set_paused(&self, target: Target, paused: bool) -> Outcome {
        match target {
            Target::Node(id) => {
                let member = self.stand.cluster.members().into_iter().find(|member| member.id == id);
                member.map_or(Ok(()), |member| pause(&member, paused))
            }
            Target::Role(at) => match self.roles[at].pid() {
                Some(pid) => signal(pid, if paused { Signal::STOP } else { Signal::CONT }),
                None => Ok(()),
            },
        }
    }
}

impl Blow {
    fn told(self) -> &'static str {
        match self {
            Self::Kill => "is killed",
            Self::Pause => "stands still",
            Self::Cut => "is cut off",
        }
    }
}

impl Toll {
    fn add(&mut self, blow: Blow) {
        match blow {
            Blow::Kill => self.kills += 1,
            Blow::Pause => self.pauses += 1,
            Blow::Cut => self.cuts += 1,
        }
    }
}

/// The next blows: one to four, each on another target. Mostly one node at most, so that something goes on; now and then
/// two, and everything has to wait.
fn hits(chance: &mut fastrand::Rng, roles: usize, cuttable: bool) -> Vec<(Target, Blow)> {
    let nodes = if chance.u8(..5) == 0 { 2 } else { chance.usize(..=1) };
    let mut ids = [1, 2, 3];
    chance.shuffle(&mut ids);
    let mut places: Vec<usize> = (0..roles).collect();
    chance.shuffle(&mut places);
    let others = chance.usize(usize::from(nodes == 0)..=2);
    let targets = ids.into_iter().take(nodes).map(Target::Node);
    let targets = targets.chain(places.into_iter().take(others).map(Target::Role));
    let mut blow = || match chance.u8(..if cuttable { 3 } else { 2 }) {
        0 => Blow::Kill,
        1 => Blow::Pause,
        _ => Blow::Cut,
    };
    targets.map(|target| (target, blow())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_role_is_hit_in_every_way_and_one_seed_is_one_storm() {
        let storm = |cuttable| {
            let mut chance = fastrand::Rng::with_seed(7);
            (0..500).map(|_| hits(&mut chance, 8, cuttable)).collect::<Vec<_>>()
        };
        assert_eq!(storm(true), storm(true));
        let all: Vec<_> = storm(true).concat();
        for target in (1..=3).map(Target::Node).chain((0..8).map(Target::Role)) {
            for blow in [Blow::Kill, Blow::Pause, Blow::Cut] {
                assert!(all.contains(&(target, blow)), "{target:?} {blow:?}");
            }
        }
        for hits in storm(true) {
            let mut targets: Vec<_> = hits.iter().map(|(target, _)| *target).collect();
            targets.sort();
            targets.dedup();
            assert_eq!((targets.len(), hits.is_empty()), (hits.len(), false), "{hits:?}");
        }
        assert!(!storm(false).concat().iter().any(|(_, blow)| *blow == Blow::Cut));
    }
}
