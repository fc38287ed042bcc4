// ioredis on a cluster: node check_ioredis.mjs HOST:PORT,…
import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import Redis from "ioredis";

const nodes = process.argv[2].split(",").map((address) => {
  const [host, port] = address.split(":");
  return { host, port: Number(port) };
});
const run = `ioredis-${randomUUID().slice(0, 8)}`;
const tag = `{${run}}`;
const ok = (step) => console.log("ok", step);
const cluster = new Redis.Cluster(nodes, { redisOptions: { commandTimeout: 20_000 } });
cluster.on("error", (error) => console.error(error.message));

assert.equal(await cluster.set(`${run}:a`, "1", "EX", 60), "OK");
assert.equal(await cluster.get(`${run}:a`), "1");
for (let i = 0; i < 200; i++) await cluster.set(`${run}:k${i}`, i);
const values = await Promise.all([...Array(200).keys()].map((i) => cluster.get(`${run}:k${i}`)));
assert.deepEqual(values, [...Array(200).keys()].map(String));
assert.equal(await cluster.incrby(`${run}:k7`, 3), 10);
await Promise.all([...Array(200).keys()].map((i) => cluster.del(`${run}:k${i}`)));
ok("strings");

await cluster.hset(`${run}:h`, { a: 1, b: 2 });
assert.deepEqual(await cluster.hgetall(`${run}:h`), { a: "1", b: "2" });
await cluster.rpush(`${run}:l`, 1, 2, 3);
assert.deepEqual(await cluster.lrange(`${run}:l`, 0, -1), ["1", "2", "3"]);
await cluster.sadd(`${tag}s1`, "a", "b");
await cluster.sadd(`${tag}s2`, "b", "c");
assert.deepEqual(await cluster.sinter(`${tag}s1`, `${tag}s2`), ["b"]);
await cluster.zadd(`${tag}z`, 1, "one", 2, "two");
assert.deepEqual(await cluster.zrange(`${tag}z`, 0, -1, "WITHSCORES"), ["one", "1", "two", "2"]);
await cluster.geoadd(`${run}:geo`, 13.361389, 38.115556, "Palermo", 15.087269, 37.502669, "Catania");
assert.equal(await cluster.geodist(`${run}:geo`, "Palermo", "Catania", "km"), "166.2742");
ok("hashes, lists, sets, sorted sets, places");

const first = await cluster.xadd(`${tag}stream`, "*", "n", "1");
await cluster.xgroup("CREATE", `${tag}stream`, "g", "0");
const read = await cluster.xreadgroup("GROUP", "g", "c", "COUNT", 10, "STREAMS", `${tag}stream`, ">");
assert.deepEqual(read, [[`${tag}stream`, [[first, ["n", "1"]]]]]);
assert.equal(await cluster.xack(`${tag}stream`, "g", first), 1);
ok("streams");

const piped = cluster.pipeline();
for (let i = 0; i < 20; i++) piped.set(`${tag}p${i}`, i).get(`${tag}p${i}`);
assert.equal((await piped.exec()).filter(([error]) => error).length, 0);
const done = await cluster.multi().set(`${tag}t`, 1).incr(`${tag}t`).get(`${tag}t`).exec();
assert.deepEqual(done, [[null, "OK"], [null, 2], [null, "2"]]);
cluster.defineCommand("both", { numberOfKeys: 1, lua: "return {redis.call('GET', KEYS[1]), ARGV[1]}" });
assert.deepEqual(await cluster.both(`${tag}t`, "x"), ["2", "x"]);
ok("pipelines, transactions, scripts");

const listener = new Redis.Cluster(nodes);
await listener.subscribe(`${run}:channel`);
const heard = new Promise((resolve) => listener.on("message", (_, message) => resolve(message)));
const shouting = setInterval(() => cluster.publish(`${run}:channel`, "hello").catch(() => {}), 50);
assert.equal(await heard, "hello");
clearInterval(shouting);
await listener.quit();
ok("channels");

const waiter = new Redis.Cluster(nodes);
const popped = waiter.blpop(`${tag}queue`, 20);
const pushing = setInterval(() => cluster.rpush(`${tag}queue`, "job").catch(() => {}), 100);
assert.deepEqual(await popped, [`${tag}queue`, "job"]);
clearInterval(pushing);
await waiter.quit();
ok("waiting");

const reader = new Redis.Cluster(nodes, { scaleReads: "all" });
const deadline = Date.now() + 20_000;
while ((await reader.get(`${tag}t`)) !== "2") assert.ok(Date.now() < deadline);
await reader.quit();
await assert.rejects(cluster.mset(`${run}:x`, 1, `${run}:y`, 2, `${run}:z`, 3, `${run}:w`, 4));
ok("replicas");
await cluster.quit();
