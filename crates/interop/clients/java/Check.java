// Java kafka-clients: java -cp 'lib/*:out' Check HOST:PORT

import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.InvalidProducerEpochException;
import org.apache.kafka.common.errors.ProducerFencedException;
import org.apache.kafka.common.errors.TopicExistsException;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

public final class Check {
    private static String address;
    private static final String RUN = UUID.randomUUID().toString().substring(0, 8);

    public static void main(String[] args) throws Exception {
        address = args[0];
        Properties settings = new Properties();
        settings.put("bootstrap.servers", address);
        try (Admin admin = Admin.create(settings)) {
            String topic = "java-" + RUN;
            topics(admin, topic);
            Map<String, String> sent = produce(topic);
            consume(admin, topic, sent);
            String out = "java-txn-" + RUN;
            transactions(admin, out);
            exactlyOnce(admin, topic, out);
            describe(admin, topic, out);
            admin.deleteTopics(List.of(topic, out)).all().get(30, TimeUnit.SECONDS);
            ok("delete topic");
        }
    }

    private static void topics(Admin admin, String topic) throws Exception {
        NewTopic wanted = new NewTopic(topic, 3, (short) 1).configs(Map.of("retention.ms", "86400000"));
        admin.createTopics(List.of(wanted)).all().get(30, TimeUnit.SECONDS);
        try {
            admin.createTopics(List.of(wanted)).all().get(30, TimeUnit.SECONDS);
            throw new AssertionError("a topic was made twice");
        } catch (ExecutionException error) {
            check(error.getCause() instanceof TopicExistsException, "wrong error: " + error.getCause());
        }
        ok("create topic");
    }

    private static Map<String, String> produce(String topic) throws Exception {
        Map<String, String> sent = new HashMap<>();
        for (String codec : List.of("none", "gzip", "snappy", "lz4", "zstd")) {
            try (KafkaProducer<String, String> producer = producer(Map.of("compression.type", codec, "linger.ms", "5"))) {
                for (int i = 0; i < 100; i++) {
                    ProducerRecord<String, String> record =
                            new ProducerRecord<>(topic, codec + "-" + i, ("value " + i + " ").repeat(20));
                    record.headers().add("a", "1".getBytes()).add("a", "2".getBytes()).add("null", null);
                    producer.send(record);
                    sent.put(record.key(), record.value());
                }
                producer.flush();
            }
        }
        ok("produce with every compression");
        return sent;
    }

    private static void consume(Admin admin, String topic, Map<String, String> sent) throws Exception {
        Map<String, String> seen = new HashMap<>();
        String group = "java-" + RUN;
        try (KafkaConsumer<String, String> consumer = consumer(group, Map.of())) {
            consumer.subscribe(List.of(topic));
            for (ConsumerRecord<String, String> record : read(consumer, sent.size())) {
                seen.put(record.key(), record.value());
                check(record.headers().toArray().length == 3, "headers: " + record.headers());
            }
            check(seen.equals(sent), "what came is not what went");
            ok("consume in a group");
            consumer.commitSync();
        }
        try (KafkaProducer<String, String> producer = producer(Map.of())) {
            producer.send(new ProducerRecord<>(topic, "after")).get(30, TimeUnit.SECONDS);
        }
        try (KafkaConsumer<String, String> consumer =
                consumer(group, Map.of("partition.assignment.strategy", "org.apache.kafka.clients.consumer.RangeAssignor"))) {
            consumer.subscribe(List.of(topic));
            check(read(consumer, 1).get(0).value().equals("after"), "not the next record");
            Set<TopicPartition> partitions =
                    IntStream.range(0, 3).mapToObj(p -> new TopicPartition(topic, p)).collect(Collectors.toSet());
            Map<TopicPartition, Long> times = partitions.stream().collect(Collectors.toMap(p -> p, p -> 1L));
            consumer.offsetsForTimes(times).values().forEach(found -> check(found.offset() == 0, "time: " + found));
            long end = consumer.endOffsets(partitions).values().stream().mapToLong(Long::longValue).sum();
            check(end == sent.size() + 1, "end offsets: " + end);
        }
        ok("go on after a commit");
    }

    private static void transactions(Admin admin, String out) throws Exception {
        admin.createTopics(List.of(new NewTopic(out, 1, (short) 1))).all().get(30, TimeUnit.SECONDS);
        Map<String, String> settings = Map.of("transactional.id", "java-" + RUN);
        KafkaProducer<String, String> old = producer(settings);
        old.initTransactions();
        for (String value : List.of("1", "abort", "3")) {
            old.beginTransaction();
            old.send(new ProducerRecord<>(out, value));
            if (value.equals("abort")) {
                old.flush();
                old.abortTransaction();
            } else {
                old.commitTransaction();
            }
        }
        // Transaction version 2, which the client uses because the feature says so: every transaction has its own epoch.
        check(admin.describeFeatures().featureMetadata().get(30, TimeUnit.SECONDS).finalizedFeatures()
                .get("transaction.version").maxVersionLevel() == 2, "transaction.version");
        int epoch = admin.describeTransactions(List.of("java-" + RUN)).all().get(30, TimeUnit.SECONDS)
                .get("java-" + RUN).producerEpoch();
        check(epoch == 3, "producer epoch after three transactions: " + epoch);
        old.beginTransaction();
        try (KafkaProducer<String, String> next = producer(settings)) {
            next.initTransactions();
            try {
                old.send(new ProducerRecord<>(out, "fenced"));
                old.commitTransaction();
                throw new AssertionError("a fenced producer committed");
            } catch (ProducerFencedException | InvalidProducerEpochException expected) {
                old.close(Duration.ZERO);
            }
        }
        try (KafkaConsumer<String, String> careful = consumer("careful-" + RUN, Map.of("isolation.level", "read_committed"))) {
            careful.subscribe(List.of(out));
            List<String> values = read(careful, 2).stream().map(ConsumerRecord::value).toList();
            check(values.equals(List.of("1", "3")), "read committed: " + values);
        }
        ok("transactions");
    }

    private static void exactlyOnce(Admin admin, String in, String out) throws Exception {
        String group = "eos-" + RUN;
        try (KafkaConsumer<String, String> consumer = consumer(group, Map.of("isolation.level", "read_committed"));
                KafkaProducer<String, String> producer = producer(Map.of("transactional.id", "eos-" + RUN))) {
            consumer.subscribe(List.of(in));
            producer.initTransactions();
            List<ConsumerRecord<String, String>> records = read(consumer, 10);
            Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>();
            producer.beginTransaction();
            for (ConsumerRecord<String, String> record : records) {
                producer.send(new ProducerRecord<>(out, record.value()));
                offsets.put(new TopicPartition(in, record.partition()), new OffsetAndMetadata(record.offset() + 1));
            }
            producer.sendOffsetsToTransaction(offsets, consumer.groupMetadata());
            producer.commitTransaction();
            Map<TopicPartition, OffsetAndMetadata> stored =
                    admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata().get(30, TimeUnit.SECONDS);
            check(stored.keySet().containsAll(offsets.keySet()), "offsets of the transaction: " + stored);
        }
        ok("exactly once");
    }

    private static void describe(Admin admin, String topic, String out) throws Exception {
        admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(5))).all().get(30, TimeUnit.SECONDS);
        check(admin.describeTopics(List.of(topic)).allTopicNames().get(30, TimeUnit.SECONDS).get(topic).partitions().size() == 5,
                "partitions");
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        check(admin.describeConfigs(List.of(resource)).all().get(30, TimeUnit.SECONDS).get(resource).get("retention.ms").value()
                .equals("86400000"), "retention.ms");
        TopicPartition partition = new TopicPartition(out, 0);
        admin.deleteRecords(Map.of(partition, RecordsToDelete.beforeOffset(2))).all().get(30, TimeUnit.SECONDS);
        check(admin.listOffsets(Map.of(partition, OffsetSpec.earliest())).all().get(30, TimeUnit.SECONDS).get(partition).offset() == 2,
                "earliest offset");
        check(admin.describeCluster().nodes().get(30, TimeUnit.SECONDS).size() >= 1, "nodes");
        check(!admin.describeLogDirs(List.of(admin.describeCluster().controller().get(30, TimeUnit.SECONDS).id()))
                .allDescriptions().get(30, TimeUnit.SECONDS).isEmpty(), "log dirs");
        check(!admin.listTransactions().all().get(30, TimeUnit.SECONDS).isEmpty(), "transactions");
        admin.describeProducers(List.of(partition)).all().get(30, TimeUnit.SECONDS);
        admin.listGroups().all().get(30, TimeUnit.SECONDS);
        ok("admin");
    }

    private static KafkaProducer<String, String> producer(Map<String, String> more) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", address);
        settings.put("key.serializer", StringSerializer.class.getName());
        settings.put("value.serializer", StringSerializer.class.getName());
        settings.putAll(more);
        return new KafkaProducer<>(settings);
    }

    private static KafkaConsumer<String, String> consumer(String group, Map<String, String> more) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", address);
        settings.put("group.id", group);
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", "false");
        settings.put("key.deserializer", StringDeserializer.class.getName());
        settings.put("value.deserializer", StringDeserializer.class.getName());
        settings.putAll(more);
        return new KafkaConsumer<>(settings);
    }

    private static List<ConsumerRecord<String, String>> read(KafkaConsumer<String, String> consumer, int count) {
        List<ConsumerRecord<String, String>> seen = new ArrayList<>();
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(30);
        while (seen.size() < count) {
            check(System.nanoTime() < deadline, "only " + seen.size() + " of " + count + " records");
            consumer.poll(Duration.ofMillis(200)).forEach(seen::add);
        }
        return seen;
    }

    private static void check(boolean holds, String message) {
        if (!holds) {
            throw new AssertionError(message);
        }
    }

    private static void ok(String step) {
        System.out.println("ok " + step);
    }
}
