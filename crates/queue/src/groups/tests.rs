//! The group coordinator as a black box: scenario files, randomized requests, and reloads of the log.

mod harness;
mod offsets;
mod randomized;
mod scenario;

use super::*;

#[test]
fn partition_is_javas_hash_of_the_name() {
    for (group, partition) in
        [("", 0), ("a", 97 % 50), ("my-group", 12), ("polygenelubricants", 0), ("그룹", 19)]
    {
        assert_eq!(partition_for(group, 50), partition, "{group}");
    }
}
