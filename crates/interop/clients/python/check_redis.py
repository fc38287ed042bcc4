"""redis-py on a cluster: python check_redis.py HOST:PORT,…"""

import sys
import threading
import time
import uuid

import redis
from redis.cluster import ClusterNode, RedisCluster

nodes = [address.rsplit(":", 1) for address in sys.argv[1].split(",")]
startup = [ClusterNode(host, int(port)) for host, port in nodes]
run = f"redis-py-{uuid.uuid4().hex[:8]}"


def ok(step):
    print("ok", step, flush=True)


def key(name):
    return f"{run}:{name}"


for protocol in (2, 3):
    client = RedisCluster(startup_nodes=startup, protocol=protocol, decode_responses=True)
    tag = f"{{{run}:{protocol}}}"

    assert client.set(key("a"), "1", ex=60) and client.get(key("a")) == "1"
    assert client.set(key("a"), "2", nx=True) is None and client.set(key("a"), "3", get=True) == "1"
    assert 0 < client.ttl(key("a")) <= 60 or client.ttl(key("a")) == -1
    for i in range(200):
        client.set(key(f"k{i}"), i)
    assert client.mget_nonatomic(*[key(f"k{i}") for i in range(200)]) == [str(i) for i in range(200)]
    assert client.incrby(key("k7"), 3) == 10 and client.incrbyfloat(key("k8"), 0.5) == 8.5
    assert client.exists(*[key(f"k{i}") for i in range(200)]) == 200
    assert client.delete(*[key(f"k{i}") for i in range(200)]) == 200
    assert client.setrange(key("s"), 3, "xyz") == 6 and client.getrange(key("s"), 3, -1) == "xyz"
    assert client.delete(key("s")) == 1
    ok(f"resp{protocol} strings")

    client.hset(key("h"), mapping={"a": 1, "b": 2})
    assert client.hgetall(key("h")) == {"a": "1", "b": "2"} and client.hincrby(key("h"), "a", 4) == 5
    client.rpush(key("l"), *range(5))
    assert client.lrange(key("l"), 0, -1) == ["0", "1", "2", "3", "4"] and client.lpos(key("l"), "3") == 3
    assert client.lpop(key("l"), 2) == ["0", "1"]
    client.sadd(tag + "s1", "a", "b", "c")
    client.sadd(tag + "s2", "b", "c", "d")
    assert set(client.sinter(tag + "s1", tag + "s2")) == {"b", "c"}
    client.zadd(tag + "z", {"one": 1, "two": 2, "three": 3})
    assert client.zrange(tag + "z", 0, 1) == ["one", "two"] and client.zscore(tag + "z", "three") == 3.0
    assert client.zrangebyscore(tag + "z", "(1", "+inf") == ["two", "three"]
    assert client.pfadd(key("hll"), *range(100)) == 1 and 95 <= client.pfcount(key("hll")) <= 105
    assert client.setbit(key("bits"), 7, 1) == 0 and client.bitcount(key("bits")) == 1
    client.geoadd(key("geo"), [13.361389, 38.115556, "Palermo", 15.087269, 37.502669, "Catania"])
    assert abs(float(client.geodist(key("geo"), "Palermo", "Catania", "km")) - 166.2742) < 0.001
    assert client.geosearch(key("geo"), longitude=15, latitude=37, radius=100, unit="km") == ["Catania"]
    assert {client.type(key("h")), client.type(key("l")), client.type(tag + "z")} == {"hash", "list", "zset"}
    client.delete(key("h"), key("l"), key("hll"), key("bits"), key("geo"))
    ok(f"resp{protocol} hashes, lists, sets, sorted sets, places")

    stream = tag + "stream"
    first = client.xadd(stream, {"n": 1})
    client.xadd(stream, {"n": 2})
    assert client.xlen(stream) == 2 and client.xrange(stream)[0][0] == first
    client.xgroup_create(stream, "g", id="0")
    answer = client.xreadgroup("g", "c", {stream: ">"}, count=10)
    entries = answer[stream][0] if isinstance(answer, dict) else answer[0][1]
    assert len(entries) == 2, answer
    assert client.xpending(stream, "g")["pending"] == 2 and client.xack(stream, "g", first) == 1
    assert client.xinfo_groups(stream)[0]["pending"] == 1
    claimed = client.xautoclaim(stream, "g", "other", min_idle_time=0)
    assert len(claimed[1]) == 1, claimed
    ok(f"resp{protocol} streams")

    with client.pipeline() as pipe:
        for i in range(50):
            pipe.set(key(f"p{i}"), i)
        for i in range(50):
            pipe.get(key(f"p{i}"))
        answers = pipe.execute()
    assert answers[50:] == [str(i) for i in range(50)], answers[50:]
    client.delete(*[key(f"p{i}") for i in range(50)])
    with client.pipeline(transaction=True) as pipe:
        pipe.set(tag + "t", 1).incr(tag + "t").get(tag + "t")
        answers = pipe.execute()
    assert answers[1:] == [2, "2"] and answers[0] in (True, "OK"), answers
    assert client.eval("return redis.call('GET', KEYS[1])", 1, tag + "t") == "2"
    sha = client.script_load("return ARGV[1]")
    assert client.evalsha(sha, 1, tag + "t", "x") == "x"
    ok(f"resp{protocol} pipelines, transactions, scripts")

    heard = []
    listener = client.pubsub()
    listener.subscribe(key("channel"))
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not heard:
        client.publish(key("channel"), "hello")
        message = listener.get_message(timeout=0.2)
        if message and message["type"] == "message":
            heard.append(message["data"])
    assert heard and heard[0] == "hello"
    listener.close()
    sharded = client.pubsub()
    sharded.ssubscribe(tag + "shard")
    heard = []
    while time.monotonic() < deadline and not heard:
        client.spublish(tag + "shard", "there")
        message = sharded.get_sharded_message(timeout=0.2)
        if message and message["type"] == "smessage":
            heard.append(message["data"])
    assert heard and heard[0] == "there"
    ok(f"resp{protocol} channels")

    popped = []
    waiter = threading.Thread(target=lambda: popped.append(client.blpop([tag + "queue"], timeout=20)))
    waiter.start()
    while not popped and waiter.is_alive():
        client.rpush(tag + "queue", "job")
        waiter.join(0.2)
    assert popped and list(popped[0]) == [tag + "queue", "job"], popped
    client.delete(tag + "queue")
    read = []
    waiter = threading.Thread(target=lambda: read.append(client.xread({stream: "$"}, block=20_000)))
    waiter.start()
    while not read and waiter.is_alive():
        client.xadd(stream, {"late": "yes"})
        waiter.join(0.2)
    assert read and stream in str(read[0]) and "late" in str(read[0]), read

    def wait_in_group():
        try:
            read.append(client.xreadgroup("g", "c", {stream: ">"}, block=20_000))
        except redis.exceptions.ResponseError as error:
            read.append(str(error))

    client.xreadgroup("g", "c", {stream: ">"})
    read.clear()
    waiter = threading.Thread(target=wait_in_group)
    waiter.start()
    waiting = time.monotonic() + 20
    owner = client.get_node_from_key(stream)
    while client.info("clients", target_nodes=owner)["blocked_clients"] == 0:
        assert time.monotonic() < waiting
    client.delete(stream)
    waiter.join()
    assert "no longer exists" in str(read[0]), read
    ok(f"resp{protocol} waiting")

    client.set(tag + "read", "1")
    reader = RedisCluster(
        startup_nodes=startup, protocol=protocol, decode_responses=True, read_from_replicas=True
    )
    deadline = time.monotonic() + 20
    while reader.get(tag + "read") != "1":
        assert time.monotonic() < deadline
    payload = RedisCluster(startup_nodes=startup, protocol=protocol).dump(tag + "read")
    assert client.restore(tag + "copy", 0, payload) and client.get(tag + "copy") == "1"
    try:
        client.mset({key("x"): 1, key("y"): 2, key("z"): 3, key("w"): 4})
        raise AssertionError("keys of several slots")
    except redis.exceptions.RedisClusterException:
        pass
    seen = set(client.scan_iter(match=tag + "*"))
    assert tag + "read" in seen and tag + "z" in seen, seen
    client.delete(*[name for name in seen])
    ok(f"resp{protocol} replicas, payloads, scans")
    client.close()
    reader.close()
