"""kafka-python: python check_kafka_python.py HOST:PORT"""

import sys
import time
import uuid

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import NewTopic

address = sys.argv[1]
run = uuid.uuid4().hex[:8]


def ok(step):
    print("ok", step, flush=True)


def read(consumer, count, patience=30):
    seen, deadline = [], time.time() + patience
    while len(seen) < count:
        assert time.time() < deadline, f"only {len(seen)} of {count} records"
        for batch in consumer.poll(timeout_ms=500).values():
            seen.extend(batch)
    return seen


admin = KafkaAdminClient(bootstrap_servers=address)
topic = f"kafka-python-{run}"
admin.create_topics([NewTopic(topic, 3, 1)])
ok("create topic")

sent = {}
for codec in [None, "gzip"]:
    producer = KafkaProducer(bootstrap_servers=address, compression_type=codec, acks="all", linger_ms=5)
    futures = []
    for i in range(100):
        key, value = f"{codec}-{i}".encode(), (f"value {i} " * 20).encode()
        futures.append(producer.send(topic, key=key, value=value, headers=[("a", b"1"), ("a", b"2")]))
        sent[key] = value
    for future in futures:
        future.get(30)
    producer.close()
ok("produce with compression")

group = f"kafka-python-{run}"
options = {"bootstrap_servers": address, "group_id": group, "auto_offset_reset": "earliest", "enable_auto_commit": False}
consumer = KafkaConsumer(topic, **options)
seen = read(consumer, len(sent))
assert {r.key: r.value for r in seen} == sent
assert all(list(r.headers) == [("a", b"1"), ("a", b"2")] for r in seen)
ok("consume in a group")

consumer.commit()
consumer.close()
producer = KafkaProducer(bootstrap_servers=address)
producer.send(topic, b"after").get(30)
consumer = KafkaConsumer(topic, **options)
assert [r.value for r in read(consumer, 1)] == [b"after"]
ok("go on after a commit")

partitions = [TopicPartition(topic, p) for p in range(3)]
found = consumer.offsets_for_times({p: 1 for p in partitions})
assert all(found[p] is not None and found[p].offset == 0 for p in partitions)
assert sum(consumer.end_offsets(partitions).values()) == len(sent) + 1
consumer.close()
ok("offsets by time")

admin.delete_topics([topic])
ok("delete topic")
admin.close()
producer.close()
