// kafkajs: node check_kafkajs.mjs HOST:PORT
import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import kafkajs from 'kafkajs'

const { Kafka, CompressionTypes, logLevel } = kafkajs
const run = randomUUID().slice(0, 8)
const kafka = new Kafka({ clientId: 'kafkajs', brokers: [process.argv[2]], logLevel: logLevel.ERROR })
const ok = (step) => console.log('ok', step)

const read = async (groupId, topic, count, options = {}) => {
  const consumer = kafka.consumer({ groupId, ...options })
  await consumer.connect()
  await consumer.subscribe({ topic, fromBeginning: true })
  const seen = []
  await new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Error(`only ${seen.length} of ${count} records`)), 30_000)
    const eachMessage = async ({ message, partition }) => {
      seen.push({ ...message, partition })
      if (seen.length === count) {
        clearTimeout(timer)
        resolve()
      }
    }
    consumer.run({ eachMessage, autoCommitThreshold: 1 }).catch(reject)
  })
  await consumer.disconnect()
  return seen
}

const admin = kafka.admin()
await admin.connect()
const topic = `kafkajs-${run}`
await admin.createTopics({ topics: [{ topic, numPartitions: 3, replicationFactor: 1 }], waitForLeaders: true })
ok('create topic')

const sent = new Map()
const producer = kafka.producer({ idempotent: true, createPartitioner: kafkajs.Partitioners.DefaultPartitioner })
await producer.connect()
for (const compression of [CompressionTypes.None, CompressionTypes.GZIP]) {
  const messages = []
  for (let i = 0; i < 100; i++) {
    const message = { key: `${compression}-${i}`, value: `value ${i} `.repeat(20), headers: { a: ['1', '2'] } }
    messages.push(message)
    sent.set(message.key, message.value)
  }
  await producer.send({ topic, compression, acks: -1, messages })
}
ok('produce with compression')

const groupId = `kafkajs-${run}`
const seen = await read(groupId, topic, sent.size)
assert.deepEqual(new Map(seen.map((m) => [m.key.toString(), m.value.toString()])), sent)
assert.ok(seen.every((m) => m.headers.a.map(String).join() === '1,2'))
ok('consume in a group')

await producer.send({ topic, messages: [{ value: 'after' }] })
const next = await read(groupId, topic, 1)
assert.deepEqual(next.map((m) => m.value.toString()), ['after'])
ok('go on after a commit')

const offsets = await admin.fetchTopicOffsetsByTimestamp(topic, 1)
assert.ok(offsets.every(({ offset }) => offset === '0'))
const ends = await admin.fetchTopicOffsets(topic)
assert.equal(ends.reduce((sum, { high }) => sum + Number(high), 0), sent.size + 1)
ok('offsets by time')

const out = `kafkajs-txn-${run}`
await admin.createTopics({ topics: [{ topic: out, numPartitions: 1, replicationFactor: 1 }], waitForLeaders: true })
const transactional = kafka.producer({
  transactionalId: `kafkajs-${run}`,
  idempotent: true,
  maxInFlightRequests: 1,
  createPartitioner: kafkajs.Partitioners.DefaultPartitioner,
})
await transactional.connect()
for (const [value, commit] of [['1', true], ['2', false], ['3', true]]) {
  const transaction = await transactional.transaction()
  await transaction.send({ topic: out, messages: [{ value }] })
  if (commit) await transaction.commit()
  else await transaction.abort()
}
const committed = await read(`careful-${run}`, out, 2, { readUncommitted: false })
assert.deepEqual(committed.map((m) => m.value.toString()), ['1', '3'])
ok('transactions')

const { groups } = await admin.describeGroups([groupId])
assert.equal(groups[0].groupId, groupId)
await admin.deleteGroups([groupId])
await admin.deleteTopics({ topics: [topic, out] })
ok('admin')
await Promise.all([producer.disconnect(), transactional.disconnect(), admin.disconnect()])
