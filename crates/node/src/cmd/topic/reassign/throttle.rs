//! How fast replicas may be moved: two settings of the brokers, which any Kafka tool can set too.

use moim_wire_kafka::messages::IncrementalAlterConfigsRequest;
use moim_wire_kafka::messages::incremental_alter_configs::{AlterConfigsResource, AlterableConfig};

use crate::client::{Client, errors};
use crate::exit::Outcome;

/// What a broker sends, and what it takes in.
const RATES: [&str; 2] = ["leader.replication.throttled.rate", "follower.replication.throttled.rate"];
/// The resource type of brokers; without a name all of them are meant.
const BROKERS: i8 = 4;
const SET: i8 = 0;
const DELETE: i8 = 1;

/// From now on every broker keeps to this rate; none lifts it.
pub(super) async fn set(client: &mut Client, rate: Option<u64>) -> Outcome {
    let change = |name: &str| AlterableConfig {
        name: name.into(),
        config_operation: if rate.is_some() { SET } else { DELETE },
        value: rate.map(|rate| rate.to_string().into()),
    };
    let resource = AlterConfigsResource {
        resource_type: BROKERS,
        resource_name: "".into(),
        configs: RATES.map(change).into(),
    };
    let request = IncrementalAlterConfigsRequest { resources: vec![resource], validate_only: false };
    let answer = client.any(&request).await?;
    for one in answer.responses {
        errors::check(one.error_code, one.error_message.as_deref())
            .map_err(|failure| failure.context("the rate of moves"))?;
    }
    Ok(())
}
