"""confluent-kafka-python (librdkafka): python check_confluent.py HOST:PORT"""

import sys
import time
import uuid

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
)

address = sys.argv[1]
run = uuid.uuid4().hex[:8]
base = {"bootstrap.servers": address, "broker.address.family": "v4"}


def ok(step):
    print("ok", step, flush=True)


def read(consumer, count, patience=30):
    seen, deadline = [], time.time() + patience
    while len(seen) < count:
        assert time.time() < deadline, f"only {len(seen)} of {count} records"
        message = consumer.poll(0.5)
        if message is not None:
            assert message.error() is None, message.error()
            seen.append(message)
    return seen


def consumer(group, **more):
    settings = {"group.id": group, "auto.offset.reset": "earliest", "enable.auto.commit": False}
    settings.update({key.replace("_", "."): value for key, value in more.items()})
    return Consumer(base | settings)


admin = AdminClient(base)
topic = f"confluent-{run}"
admin.create_topics([NewTopic(topic, 3, 1)])[topic].result(30)
ok("create topic")

sent = {}
for codec in ["none", "gzip", "snappy", "lz4", "zstd"]:
    producer = Producer(base | {"compression.type": codec, "enable.idempotence": True, "linger.ms": 5})
    for i in range(100):
        key, value = f"{codec}-{i}".encode(), (f"value {i} " * 20).encode()
        headers = [("codec", codec.encode()), ("twice", b"1"), ("twice", b"2"), ("null", None)]
        producer.produce(topic, key=key, value=value, headers=headers)
        sent[key] = value
    assert producer.flush(30) == 0
ok("produce with every compression")

group = f"confluent-{run}"
first = consumer(group)
first.subscribe([topic])
seen = read(first, len(sent))
assert {m.key(): m.value() for m in seen} == sent
assert all([h[0] for h in m.headers()] == ["codec", "twice", "twice", "null"] for m in seen)
ok("consume in a group")

first.commit(asynchronous=False)
first.close()
producer = Producer(base)
producer.produce(topic, value=b"after")
producer.flush(30)
second = consumer(group)
second.subscribe([topic])
assert [m.value() for m in read(second, 1)] == [b"after"]
second.close()
ok("go on after a commit")

probe = consumer("probe")
when = [TopicPartition(topic, p, 0) for p in range(3)]
assert all(found.offset == 0 for found in probe.offsets_for_times(when, 30))
low, high = zip(*(probe.get_watermark_offsets(TopicPartition(topic, p), 30) for p in range(3)))
assert sum(high) == len(sent) + 1 and sum(low) == 0
probe.close()
ok("offsets by time")

out = f"confluent-txn-{run}"
admin.create_topics([NewTopic(out, 1, 1)])[out].result(30)
transactional = Producer(base | {"transactional.id": f"confluent-{run}"})
transactional.init_transactions(30)
for value, commit in [(b"1", True), (b"2", False), (b"3", True)]:
    transactional.begin_transaction()
    transactional.produce(out, value=value)
    transactional.flush(30)
    if commit:
        transactional.commit_transaction(30)
    else:
        transactional.abort_transaction(30)
careful = consumer(f"careful-{run}", isolation_level="read_committed")
careful.subscribe([out])
assert [m.value() for m in read(careful, 2)] == [b"1", b"3"]
careful.close()
ok("transactions")

admin.create_partitions([NewPartitions(topic, 5)])[topic].result(30)
resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
settings = admin.describe_configs([resource])[resource].result(30)
assert settings["cleanup.policy"].value == "delete"
listed = admin.list_offsets({TopicPartition(out, 0): OffsetSpec.latest()})
assert listed[TopicPartition(out, 0)].result(30).offset == 6, "three records and their three markers"
cluster = admin.describe_cluster().result(30)
assert len(cluster.nodes) >= 1
described = admin.describe_consumer_groups([group])[group].result(30)
assert described.group_id == group
ok("admin")

for future in admin.delete_topics([topic, out]).values():
    future.result(30)
try:
    admin.delete_topics([topic])[topic].result(30)
    raise SystemExit("a topic was deleted twice")
except KafkaException:
    pass
ok("delete topic")
