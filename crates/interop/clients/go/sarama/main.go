// Sarama: sarama HOST:PORT
package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/IBM/sarama"
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

func settings() *sarama.Config {
	config := sarama.NewConfig()
	config.Version = sarama.V2_8_0_0
	config.Producer.Return.Successes = true
	config.Producer.RequiredAcks = sarama.WaitForAll
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	config.Consumer.Offsets.AutoCommit.Enable = false
	return config
}

// member reads until it has enough, marks and commits what it read, and leaves.
type member struct {
	want int
	seen chan *sarama.ConsumerMessage
}

func (m *member) Setup(sarama.ConsumerGroupSession) error   { return nil }
func (m *member) Cleanup(sarama.ConsumerGroupSession) error { return nil }
func (m *member) ConsumeClaim(session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for {
		select {
		case message, open := <-claim.Messages():
			if !open {
				return nil
			}
			session.MarkMessage(message, "")
			m.seen <- message
		case <-session.Context().Done():
			session.Commit()
			return nil
		}
	}
}

func read(brokers []string, group, topic string, count int) []*sarama.ConsumerMessage {
	consumer, err := sarama.NewConsumerGroup(brokers, group, settings())
	must(err, "group")
	ctx, cancel := context.WithCancel(context.Background())
	m := &member{want: count, seen: make(chan *sarama.ConsumerMessage, count+100)}
	done := make(chan error, 1)
	go func() { done <- consumer.Consume(ctx, []string{topic}, m) }()
	var messages []*sarama.ConsumerMessage
	timeout := time.After(30 * time.Second)
	for len(messages) < count {
		select {
		case message := <-m.seen:
			messages = append(messages, message)
		case err := <-done:
			must(fmt.Errorf("%v after %d of %d records", err, len(messages), count), "consume")
		case <-timeout:
			must(fmt.Errorf("only %d of %d records", len(messages), count), "consume")
		}
	}
	cancel()
	<-done
	must(consumer.Close(), "close")
	return messages
}

func main() {
	brokers := []string{os.Args[1]}
	run := fmt.Sprintf("%x", time.Now().UnixNano())
	topic, out := "sarama-"+run, "sarama-txn-"+run
	admin, err := sarama.NewClusterAdmin(brokers, settings())
	must(err, "admin")
	must(admin.CreateTopic(topic, &sarama.TopicDetail{NumPartitions: 3, ReplicationFactor: 1}, false), "create topic")
	must(admin.CreateTopic(out, &sarama.TopicDetail{NumPartitions: 1, ReplicationFactor: 1}, false), "create topic")
	ok("create topic")

	sent := map[string]string{}
	codecs := []sarama.CompressionCodec{
		sarama.CompressionNone, sarama.CompressionGZIP, sarama.CompressionSnappy, sarama.CompressionLZ4, sarama.CompressionZSTD,
	}
	for _, codec := range codecs {
		config := settings()
		config.Producer.Compression = codec
		config.Producer.Idempotent = true
		config.Net.MaxOpenRequests = 1
		producer, err := sarama.NewSyncProducer(brokers, config)
		must(err, "producer")
		var messages []*sarama.ProducerMessage
		for i := 0; i < 100; i++ {
			key, value := fmt.Sprintf("%s-%d", codec, i), strings.Repeat(fmt.Sprintf("value %d ", i), 20)
			messages = append(messages, &sarama.ProducerMessage{
				Topic: topic, Key: sarama.StringEncoder(key), Value: sarama.StringEncoder(value),
				Headers: []sarama.RecordHeader{{Key: []byte("a"), Value: []byte("1")}, {Key: []byte("a"), Value: []byte("2")}},
			})
			sent[key] = value
		}
		must(producer.SendMessages(messages), "produce")
		must(producer.Close(), "close")
	}
	ok("produce with every compression")

	seen := map[string]string{}
	for _, message := range read(brokers, "sarama-"+run, topic, len(sent)) {
		seen[string(message.Key)] = string(message.Value)
		check(len(message.Headers) == 2, "headers: %v", message.Headers)
	}
	for key, value := range sent {
		check(seen[key] == value, "key %s came back as %q", key, seen[key])
	}
	ok("consume in a group")

	producer, err := sarama.NewSyncProducer(brokers, settings())
	must(err, "producer")
	_, _, err = producer.SendMessage(&sarama.ProducerMessage{Topic: topic, Value: sarama.StringEncoder("after")})
	must(err, "produce")
	next := read(brokers, "sarama-"+run, topic, 1)
	check(string(next[0].Value) == "after", "not the next record: %s", next[0].Value)
	ok("go on after a commit")

	client, err := sarama.NewClient(brokers, settings())
	must(err, "client")
	for partition := int32(0); partition < 3; partition++ {
		offset, err := client.GetOffset(topic, partition, 1)
		must(err, "offsets by time")
		check(offset == 0, "partition %d: %d", partition, offset)
	}
	ok("offsets by time")

	config := settings()
	config.Producer.Idempotent = true
	config.Net.MaxOpenRequests = 1
	config.Producer.Transaction.ID = "sarama-" + run
	transactional, err := sarama.NewSyncProducer(brokers, config)
	must(err, "transactional producer")
	for _, step := range []struct {
		value  string
		commit bool
	}{{"1", true}, {"2", false}, {"3", true}} {
		must(transactional.BeginTxn(), "begin")
		_, _, err := transactional.SendMessage(&sarama.ProducerMessage{Topic: out, Value: sarama.StringEncoder(step.value)})
		must(err, "produce")
		if step.commit {
			must(transactional.CommitTxn(), "commit")
		} else {
			must(transactional.AbortTxn(), "abort")
		}
	}
	config = settings()
	config.Consumer.IsolationLevel = sarama.ReadCommitted
	careful, err := sarama.NewConsumer(brokers, config)
	must(err, "consumer")
	partition, err := careful.ConsumePartition(out, 0, sarama.OffsetOldest)
	must(err, "partition")
	for _, want := range []string{"1", "3"} {
		select {
		case message := <-partition.Messages():
			check(string(message.Value) == want, "read committed: %s", message.Value)
		case <-time.After(30 * time.Second):
			must(fmt.Errorf("nothing came"), "read committed")
		}
	}
	ok("transactions")

	_, err = admin.DescribeConsumerGroups([]string{"sarama-" + run})
	must(err, "describe group")
	must(admin.DeleteTopic(topic), "delete topic")
	must(admin.DeleteTopic(out), "delete topic")
	ok("admin")
}
