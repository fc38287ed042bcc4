//! Clients that hold one lock, some of which disappear with it, and a register that accepts only the newest fencing
//! token.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use etcd_client::{Client, Error, LockOptions};

use super::World;
use super::clients::{PATIENCE, client_of};

const LOCK: &str = "the lock";
const TTL_S: i64 = 3;
/// The part of the lease TTL during which a holder relies on its lock.
const HOLD_TIME: Duration = Duration::from_millis(2_000);

/// Locks, writes and unlocks in a loop.
pub(super) async fn run(world: Arc<World>, client: usize, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed ^ (1000 + client as u64));
    let mut node = client;
    while !world.is_over() {
        let endpoint = &world.endpoints[node % world.endpoints.len()];
        node += 1;
        let Some(mut connection) = client_of(endpoint).await else { continue };
        while !world.is_over() {
            // The client waits for a lock held by others; its own timeout ends the wait.
            if hold(&world, &mut connection, client as u64, &mut random).await.is_err() {
                tokio::time::sleep(Duration::from_millis(50)).await;
                break;
            }
        }
    }
}

async fn hold(
    world: &World,
    connection: &mut Client,
    client: u64,
    random: &mut fastrand::Rng,
) -> Result<(), Error> {
    let mut lock_client = connection.lock_client();
    let asked = world.locks.ask();
    // The lease TTL counts from before the request.
    let granted = Instant::now();
    let lease = connection.lease_grant(TTL_S, None).await?.id();
    let locked =
        tokio::time::timeout(PATIENCE, lock_client.lock(LOCK, Some(LockOptions::new().with_lease(lease))))
            .await;
    let Ok(Ok(locked)) = locked else {
        let _ = connection.lease_revoke(lease).await;
        return Ok(());
    };
    let answer = connection.get(locked.key(), None).await?;
    let Some(kv) = answer.kvs().first() else { return Ok(()) };
    let token = kv.create_revision();
    if granted.elapsed() > HOLD_TIME {
        let _ = connection.lease_revoke(lease).await;
        return Ok(());
    }
    let held = world.locks.held(LOCK, client, token, asked);
    let busy = Duration::from_millis(random.u64(5..60));
    let until = Instant::now() + busy;
    while Instant::now() < until && granted.elapsed() < HOLD_TIME {
        write(world, token);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    world.locks.uncertain(held);
    assert!(
        granted.elapsed() < Duration::from_secs(3),
        "this machine held the test up for longer than a lease: nothing can be said"
    );
    if random.u8(..25) == 0 {
        // The holder disappears and returns late with its old token: the register must reject it.
        tokio::time::sleep(Duration::from_secs(4)).await;
        write(world, token);
        return Ok(());
    }
    connection.lease_revoke(lease).await.map(drop)
}

/// Writes to the register that the lock guards.
fn write(world: &World, token: i64) {
    let mut newest = world.register.lock().unwrap_or_else(PoisonError::into_inner);
    if token >= *newest {
        *newest = token;
        world.locks.accepted(LOCK, token);
    }
}
