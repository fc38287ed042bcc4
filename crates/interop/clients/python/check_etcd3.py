"""etcd3: python check_etcd3.py HOST:PORT,…"""

import sys
import threading
import time
import uuid

import etcd3

host, port = sys.argv[1].split(",")[0].split(":")
run = f"etcd3-{uuid.uuid4().hex[:8]}/"
client = etcd3.client(host=host, port=int(port), timeout=30)


def ok(step):
    print("ok", step, flush=True)


client.put(run + "a", "1")
value, meta = client.get(run + "a")
assert value == b"1" and meta.version == 1 and meta.key == (run + "a").encode()
for i in range(20):
    client.put(f"{run}k{i:02}", str(i))
seen = [value for value, _ in client.get_prefix(run + "k", sort_order="descend")]
assert seen == [str(i).encode() for i in reversed(range(20))], seen
assert len(list(client.get_range(run + "k05", run + "k10"))) == 5
assert client.delete(run + "a") and not client.delete(run + "a")
assert client.delete_prefix(run + "k").deleted == 20
ok("get, put, delete")

assert client.put_if_not_exists(run + "once", "1")
assert not client.put_if_not_exists(run + "once", "2")
assert client.replace(run + "once", "1", "3") and not client.replace(run + "once", "1", "4")
done, answers = client.transaction(
    compare=[client.transactions.value(run + "once") == "3", client.transactions.version(run + "once") > 0],
    success=[client.transactions.put(run + "t", "yes"), client.transactions.get(run + "t")],
    failure=[client.transactions.delete(run + "once")],
)
assert done and answers[1][0][0] == b"yes", answers
ok("transactions")

events, cancel = client.watch_prefix(run + "w/")
threading.Timer(0.2, lambda: [client.put(f"{run}w/{i}", str(i)) for i in range(10)]).start()
for i in range(10):
    event = next(events)
    assert (event.key, event.value) == (f"{run}w/{i}".encode(), str(i).encode()), event
cancel()
ok("watch")

lease = client.lease(2)
client.put(run + "leased", "x", lease=lease)
lease.refresh()
assert lease.granted_ttl == 2 and 0 < lease.remaining_ttl <= 2
assert lease.keys == [(run + "leased").encode()]
deadline = time.time() + 15
while client.get(run + "leased")[0] is not None:
    assert time.time() < deadline, "the lease does not end"
    time.sleep(0.1)
ok("lease")

first, second = client.lock(run + "lock", ttl=20), client.lock(run + "lock", ttl=20)
assert first.acquire(timeout=10)
assert not second.acquire(timeout=1)
assert first.release() and second.acquire(timeout=10) and second.release()
ok("lock")

assert len(list(client.members)) == len(sys.argv[1].split(","))
status = client.status()
assert status.leader is not None and status.raft_term > 0
assert list(client.list_alarms()) == []
client.defragment()
assert client.hash() is not None
ok("members, status")
