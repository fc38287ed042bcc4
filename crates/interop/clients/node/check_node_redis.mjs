// node-redis on a cluster: node check_node_redis.mjs HOST:PORT,…
import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { createCluster } from "redis";

const rootNodes = process.argv[2].split(",").map((address) => ({ url: `redis://${address}` }));
const run = `node-redis-${randomUUID().slice(0, 8)}`;
const ok = (step) => console.log("ok", step);

for (const RESP of [2, 3]) {
  const tag = `{${run}:${RESP}}`;
  const name = (key) => `${run}:${RESP}:${key}`;
  const cluster = createCluster({ rootNodes, RESP, useReplicas: false });
  cluster.on("error", (error) => console.error(error.message));
  await cluster.connect();

  assert.equal(await cluster.set(name("a"), "1", { expiration: { type: "EX", value: 60 } }), "OK");
  assert.equal(await cluster.get(name("a")), "1");
  await Promise.all([...Array(200).keys()].map((i) => cluster.set(name(`k${i}`), String(i))));
  const values = await Promise.all([...Array(200).keys()].map((i) => cluster.get(name(`k${i}`))));
  assert.deepEqual(values, [...Array(200).keys()].map(String));
  assert.equal(await cluster.incrBy(name("k7"), 3), 10);
  await Promise.all([...Array(200).keys()].map((i) => cluster.del(name(`k${i}`))));
  ok(`resp${RESP} strings`);

  await cluster.hSet(name("h"), { a: "1", b: "2" });
  assert.deepEqual({ ...(await cluster.hGetAll(name("h"))) }, { a: "1", b: "2" });
  await cluster.rPush(name("l"), ["1", "2", "3"]);
  assert.deepEqual(await cluster.lRange(name("l"), 0, -1), ["1", "2", "3"]);
  await cluster.sAdd(`${tag}s1`, ["a", "b"]);
  await cluster.sAdd(`${tag}s2`, ["b", "c"]);
  assert.deepEqual([...(await cluster.sInter([`${tag}s1`, `${tag}s2`]))], ["b"]);
  await cluster.zAdd(`${tag}z`, [{ score: 1, value: "one" }, { score: 2.5, value: "two" }]);
  assert.deepEqual(await cluster.zRangeWithScores(`${tag}z`, 0, -1), [
    { value: "one", score: 1 },
    { value: "two", score: 2.5 },
  ]);
  await cluster.geoAdd(name("geo"), [
    { longitude: 13.361389, latitude: 38.115556, member: "Palermo" },
    { longitude: 15.087269, latitude: 37.502669, member: "Catania" },
  ]);
  assert.equal(await cluster.geoDist(name("geo"), "Palermo", "Catania", "km"), 166.2742);
  ok(`resp${RESP} hashes, lists, sets, sorted sets, places`);

  const first = await cluster.xAdd(`${tag}stream`, "*", { n: "1" });
  await cluster.xGroupCreate(`${tag}stream`, "g", "0");
  const read = await cluster.xReadGroup("g", "c", [{ key: `${tag}stream`, id: ">" }], { COUNT: 10 });
  assert.ok(JSON.stringify(read).includes(first), JSON.stringify(read));
  assert.equal(await cluster.xAck(`${tag}stream`, "g", first), 1);
  ok(`resp${RESP} streams`);

  const done = await cluster.multi().set(`${tag}t`, "1").incr(`${tag}t`).get(`${tag}t`).exec();
  assert.deepEqual(done, ["OK", 2, "2"]);
  const both = await cluster.eval("return {redis.call('GET', KEYS[1]), ARGV[1]}", {
    keys: [`${tag}t`],
    arguments: ["x"],
  });
  assert.deepEqual(both, ["2", "x"]);
  ok(`resp${RESP} transactions, scripts`);

  let heard;
  const message = new Promise((resolve) => (heard = resolve));
  await cluster.subscribe(name("channel"), heard);
  const shouting = setInterval(() => cluster.publish(name("channel"), "hello").catch(() => {}), 50);
  assert.equal(await message, "hello");
  clearInterval(shouting);
  await cluster.unsubscribe(name("channel"));
  let heardInShard;
  const sharded = new Promise((resolve) => (heardInShard = resolve));
  await cluster.sSubscribe(`${tag}shard`, heardInShard);
  const shoutingInShard = setInterval(() => cluster.sPublish(`${tag}shard`, "there").catch(() => {}), 50);
  assert.equal(await sharded, "there");
  clearInterval(shoutingInShard);
  await cluster.sUnsubscribe(`${tag}shard`);
  ok(`resp${RESP} channels`);
  await cluster.close();
}
process.exit(0);
