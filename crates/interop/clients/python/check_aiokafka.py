"""aiokafka: python check_aiokafka.py HOST:PORT"""

import asyncio
import sys
import uuid

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

address = sys.argv[1]
run = uuid.uuid4().hex[:8]


def ok(step):
    print("ok", step, flush=True)


async def read(consumer, count):
    async def collect():
        return [await consumer.getone() for _ in range(count)]

    return await asyncio.wait_for(collect(), 30)


async def main():
    admin = AIOKafkaAdminClient(bootstrap_servers=address)
    await admin.start()
    topic = f"aiokafka-{run}"
    await admin.create_topics([NewTopic(topic, 3, 1)])
    ok("create topic")

    sent = {}
    for codec in [None, "gzip"]:
        producer = AIOKafkaProducer(bootstrap_servers=address, compression_type=codec, enable_idempotence=True)
        await producer.start()
        for i in range(100):
            key, value = f"{codec}-{i}".encode(), (f"value {i} " * 20).encode()
            await producer.send(topic, key=key, value=value, headers=[("a", b"1"), ("a", b"2")])
            sent[key] = value
        await producer.stop()
    ok("produce with compression")

    options = dict(
        bootstrap_servers=address,
        group_id=f"aiokafka-{run}",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    consumer = AIOKafkaConsumer(topic, **options)
    await consumer.start()
    seen = await read(consumer, len(sent))
    assert {r.key: r.value for r in seen} == sent
    assert all(list(r.headers) == [("a", b"1"), ("a", b"2")] for r in seen)
    ok("consume in a group")

    await consumer.commit()
    await consumer.stop()
    producer = AIOKafkaProducer(bootstrap_servers=address)
    await producer.start()
    await producer.send_and_wait(topic, b"after")
    await producer.stop()
    consumer = AIOKafkaConsumer(topic, **options)
    await consumer.start()
    assert [r.value for r in await read(consumer, 1)] == [b"after"]
    partitions = [TopicPartition(topic, p) for p in range(3)]
    found = await consumer.offsets_for_times({p: 1 for p in partitions})
    assert all(found[p].offset == 0 for p in partitions)
    await consumer.stop()
    ok("go on after a commit")

    out = f"aiokafka-txn-{run}"
    await admin.create_topics([NewTopic(out, 1, 1)])
    producer = AIOKafkaProducer(bootstrap_servers=address, transactional_id=f"aiokafka-{run}")
    await producer.start()
    for value, commit in [(b"1", True), (b"2", False), (b"3", True)]:
        await producer.begin_transaction()
        await producer.send_and_wait(out, value)
        if commit:
            await producer.commit_transaction()
        else:
            await producer.abort_transaction()
    await producer.stop()
    careful = AIOKafkaConsumer(
        out, bootstrap_servers=address, auto_offset_reset="earliest", isolation_level="read_committed"
    )
    await careful.start()
    assert [r.value for r in await read(careful, 2)] == [b"1", b"3"]
    await careful.stop()
    ok("transactions")

    await admin.delete_topics([topic, out])
    await admin.close()
    ok("delete topic")


asyncio.run(main())
