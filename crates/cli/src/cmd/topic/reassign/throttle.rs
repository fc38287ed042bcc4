//! The replication throttle of reassignments: two broker settings, which any Kafka tool can set too.

use moim_kafka_client::Client;
use moim_wire_kafka::messages::IncrementalAlterConfigsRequest;
use moim_wire_kafka::messages::incremental_alter_configs::{AlterConfigsResource, AlterableConfig};

use crate::exit::Outcome;
use crate::kafka::errors;

/// The rates of a broker as the source and as the target of a replica.
const RATES: [&str; 2] = ["leader.replication.throttled.rate", "follower.replication.throttled.rate"];
/// The resource type of brokers; without a name all of them are meant.
const BROKERS: i8 = 4;
const SET: i8 = 0;
const DELETE: i8 = 1;

/// Sets this rate on every broker; `None` removes it.
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
    let answer = client.request_any(&request).await?;
    for one in answer.responses {
        errors::check(one.error_code, one.error_message.as_deref())
            .map_err(|failure| failure.context("the rate of moves"))?;
    }
    Ok(())
}
