//! SASL PLAIN: a client with a valid password is accepted, every other client is refused.

use std::time::Duration;

use moim_interop::Server;
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};

use super::support::*;

fn metadata(address: &str, settings: &[(&str, &str)]) -> Result<usize, KafkaError> {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", address).set("group.id", "auth");
    for (key, value) in settings {
        config.set(*key, *value);
    }
    let consumer: BaseConsumer = config.create().unwrap();
    Ok(consumer.fetch_metadata(None, Duration::from_secs(5))?.brokers().len())
}

fn plain<'a>(user: &'a str, password: &'a str) -> [(&'a str, &'a str); 4] {
    [
        ("security.protocol", "sasl_plaintext"),
        ("sasl.mechanism", "PLAIN"),
        ("sasl.username", user),
        ("sasl.password", password),
    ]
}

#[test]
fn sasl_plain_accepts_only_the_right_password() {
    if std::env::var_os("INTEROP_KAFKA").is_some() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("users");
    std::fs::write(&file, "# people\nalice:s3cret\n").unwrap();
    let server = Server::start(options().set("kafka.users_file", file.display())).unwrap();
    let address = server.kafka();
    assert_eq!(metadata(address, &plain("alice", "s3cret")), Ok(1));
    for (user, password) in [("alice", "guess"), ("mallory", "s3cret")] {
        let refused = metadata(address, &plain(user, password)).unwrap_err();
        let code = refused.rdkafka_error_code();
        let known = [
            RDKafkaErrorCode::Authentication,
            RDKafkaErrorCode::BrokerTransportFailure,
            RDKafkaErrorCode::AllBrokersDown,
        ];
        assert!(code.is_some_and(|code| known.contains(&code)), "{user}: {refused}");
    }
    assert!(metadata(address, &[]).is_err(), "a client that says nothing is not served");
    assert_eq!(metadata(address, &plain("alice", "s3cret")), Ok(1), "others go on being served");
}
