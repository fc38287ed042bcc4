// franz-go: franz HOST:PORT
package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

func ok(step string) { fmt.Println("ok", step) }

func must(err error, what string) {
	if err != nil {
		fmt.Fprintln(os.Stderr, what+":", err)
		os.Exit(1)
	}
}

func check(holds bool, message string, values ...any) {
	if !holds {
		fmt.Fprintf(os.Stderr, message+"\n", values...)
		os.Exit(1)
	}
}

func connect(options ...kgo.Opt) *kgo.Client {
	client, err := kgo.NewClient(append(options, kgo.SeedBrokers(os.Args[1]))...)
	must(err, "client")
	return client
}

func read(ctx context.Context, client *kgo.Client, count int) []*kgo.Record {
	var seen []*kgo.Record
	for len(seen) < count {
		fetches := client.PollFetches(ctx)
		must(fetches.Err0(), fmt.Sprintf("only %d of %d records", len(seen), count))
		seen = append(seen, fetches.Records()...)
	}
	return seen
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	run := fmt.Sprintf("%x", time.Now().UnixNano())
	topic, out := "franz-"+run, "franz-txn-"+run
	admin := kadm.NewClient(connect())
	defer admin.Close()
	_, err := admin.CreateTopics(ctx, 3, 1, nil, topic)
	must(err, "create topic")
	_, err = admin.CreateTopics(ctx, 1, 1, nil, out)
	must(err, "create topic")
	ok("create topic")

	sent := map[string]string{}
	codecs := map[string]kgo.CompressionCodec{
		"none": kgo.NoCompression(), "gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(),
		"lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
	}
	for name, codec := range codecs {
		producer := connect(kgo.DefaultProduceTopic(topic), kgo.ProducerBatchCompression(codec))
		for i := 0; i < 100; i++ {
			key, value := fmt.Sprintf("%s-%d", name, i), strings.Repeat(fmt.Sprintf("value %d ", i), 20)
			headers := []kgo.RecordHeader{{Key: "a", Value: []byte("1")}, {Key: "a", Value: []byte("2")}}
			producer.Produce(ctx, &kgo.Record{Key: []byte(key), Value: []byte(value), Headers: headers}, nil)
			sent[key] = value
		}
		must(producer.Flush(ctx), "flush")
		producer.Close()
	}
	ok("produce with every compression")

	group := []kgo.Opt{
		kgo.ConsumerGroup("franz-" + run), kgo.ConsumeTopics(topic), kgo.DisableAutoCommit(),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
	}
	consumer := connect(group...)
	seen := map[string]string{}
	for _, record := range read(ctx, consumer, len(sent)) {
		seen[string(record.Key)] = string(record.Value)
		check(len(record.Headers) == 2, "headers: %v", record.Headers)
	}
	for key, value := range sent {
		check(seen[key] == value, "key %s came back as %q", key, seen[key])
	}
	ok("consume in a group")

	must(consumer.CommitUncommittedOffsets(ctx), "commit")
	consumer.Close()
	producer := connect(kgo.DefaultProduceTopic(topic))
	must(producer.ProduceSync(ctx, kgo.StringRecord("after")).FirstErr(), "produce")
	producer.Close()
	consumer = connect(group...)
	next := read(ctx, consumer, 1)
	check(string(next[0].Value) == "after", "not the next record: %s", next[0].Value)
	consumer.Close()
	ok("go on after a commit")

	offsets, err := admin.ListOffsetsAfterMilli(ctx, 1, topic)
	must(err, "offsets by time")
	offsets.Each(func(found kadm.ListedOffset) { check(found.Err == nil && found.Offset == 0, "time: %v", found) })
	ok("offsets by time")

	transactional := connect(kgo.DefaultProduceTopic(out), kgo.TransactionalID("franz-"+run))
	for _, step := range []struct {
		value  string
		commit kgo.TransactionEndTry
	}{{"1", kgo.TryCommit}, {"2", kgo.TryAbort}, {"3", kgo.TryCommit}} {
		must(transactional.BeginTransaction(), "begin")
		must(transactional.ProduceSync(ctx, kgo.StringRecord(step.value)).FirstErr(), "produce")
		must(transactional.EndTransaction(ctx, step.commit), "end")
	}
	transactional.Close()
	careful := connect(kgo.ConsumeTopics(out), kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	committed := read(ctx, careful, 2)
	check(string(committed[0].Value) == "1" && string(committed[1].Value) == "3", "read committed: %v", committed)
	careful.Close()
	ok("transactions")

	described, err := admin.DescribeGroups(ctx, "franz-"+run)
	must(err, "describe group")
	check(len(described) == 1, "groups: %v", described)
	_, err = admin.DeleteTopics(ctx, topic, out)
	must(err, "delete topic")
	ok("admin")
}
