"""aetcd: python check_aetcd.py HOST:PORT,…"""

import asyncio
import sys
import uuid

import aetcd

host, port = sys.argv[1].split(",")[0].split(":")
run = f"aetcd-{uuid.uuid4().hex[:8]}/".encode()


def ok(step):
    print("ok", step, flush=True)


async def main():
    async with aetcd.Client(host=host, port=int(port), timeout=30) as client:
        await client.put(run + b"a", b"1")
        assert (await client.get(run + b"a")).value == b"1"
        for i in range(20):
            await client.put(run + b"k%02d" % i, b"%d" % i)
        found = await client.get_prefix(run + b"k")
        assert [kv.value for kv in found] == [b"%d" % i for i in range(20)]
        assert (await client.delete_prefix(run + b"k")).deleted == 20
        ok("get, put, delete")

        done, _ = await client.transaction(
            compare=[client.transactions.value(run + b"a") == b"1"],
            success=[client.transactions.put(run + b"a", b"2")],
            failure=[client.transactions.delete(run + b"a")],
        )
        assert done and (await client.get(run + b"a")).value == b"2"
        ok("transactions")

        watch = await client.watch_prefix(run + b"w/")
        for i in range(10):
            await client.put(run + b"w/%d" % i, b"%d" % i)
        seen = []
        async for event in watch:
            seen.append(event.kv.value)
            if len(seen) == 10:
                break
        await watch.cancel()
        assert seen == [b"%d" % i for i in range(10)], seen
        ok("watch")

        lease = await client.lease(60)
        await client.put(run + b"leased", b"x", lease=lease)
        await lease.refresh()
        await lease.revoke()
        assert await client.get(run + b"leased") is None
        ok("lease")

        async with client.lock(run + b"lock", ttl=20):
            pass
        ok("lock")


asyncio.run(asyncio.wait_for(main(), 120))
