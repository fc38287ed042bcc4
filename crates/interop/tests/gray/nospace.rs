//! A disk filled by the log of the coordination core: delete, compact and disarm, as in etcd's documentation, must
//! free space.

use std::path::Path;
use std::time::{Duration, Instant};

use etcd_client::{AlarmAction, AlarmType, Client, CompactionOptions};
use moim_interop::{Options, Server};

use super::disk::Disk;

const DISK: u64 = 320 << 20;
/// Time limit for the log to be truncated and its space to be freed.
const PATIENCE: Duration = Duration::from_secs(30);

async fn connect(server: &Server) -> Client {
    Client::connect([server.etcd()], None).await.unwrap()
}

/// Puts until the NOSPACE error; returns the number of values.
async fn fill(client: &mut Client) -> usize {
    let value = vec![b'x'; 256 << 10];
    for count in 0..10_000 {
        if let Err(error) = client.put("big", value.clone(), None).await {
            assert!(error.to_string().contains("space exceeded"), "{error}");
            return count;
        }
    }
    panic!("the disk never got full");
}

/// Compacts everything and disarms the alarm.
async fn compact_and_disarm(client: &mut Client) {
    let revision = client.get("big", None).await.unwrap().header().unwrap().revision();
    let compacted = client.compact(revision, Some(CompactionOptions::new().with_physical())).await;
    if let Err(error) = compacted {
        assert!(error.to_string().contains("compacted"), "{error}");
    }
    for alarm in client.alarm(AlarmAction::Get, AlarmType::None, None).await.unwrap().alarms() {
        let mut options = etcd_client::AlarmOptions::new();
        options.with_member(alarm.member_id());
        client.alarm(AlarmAction::Deactivate, AlarmType::Nospace, Some(options)).await.unwrap();
    }
}

async fn await_room(client: &mut Client) {
    let began = Instant::now();
    loop {
        compact_and_disarm(client).await;
        match client.put("small", "v", None).await {
            Ok(_) => return,
            Err(error) => {
                assert!(error.to_string().contains("space exceeded"), "{error}");
                assert!(began.elapsed() < PATIENCE, "compacted and disarmed, and still: {error}");
            }
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

#[test]
fn full_disk_accepts_writes_after_compact_and_disarm() {
    let disk = match Disk::mount(Path::new(env!("CARGO_TARGET_TMPDIR")), DISK) {
        Ok(disk) => disk,
        Err(why) => return moim_base::require::skip("mount", &format!("no disk can be mounted ({why})")),
    };
    let mut options = Options::new()
        .set("journal.min_free_bytes", 128 << 20)
        .set("journal.commit_file_bytes", 8 << 20)
        .set("etcd.compaction_retention_ms", 0);
    options.data = Some(disk.path().join("data"));
    let mut server = Server::start(options).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = connect(&server).await;
        let taken = fill(&mut client).await;
        assert!(taken > 50, "only {taken} values");
        await_room(&mut client).await;
        // Once more: freed space is reused, and a restart frees it again.
        fill(&mut client).await;
        server.terminate().unwrap();
        server.restart().unwrap();
        let mut client = connect(&server).await;
        await_room(&mut client).await;
    });
}
