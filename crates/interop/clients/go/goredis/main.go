// go-redis on a cluster: check HOST:PORT,…
package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

func ok(step string) { fmt.Println("ok", step) }

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func check(right bool, what ...any) {
	if !right {
		panic(fmt.Sprint(what...))
	}
}

func main() {
	addresses := strings.Split(os.Args[1], ",")
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	for _, protocol := range []int{2, 3} {
		run := fmt.Sprintf("go-redis-%d-%d", time.Now().UnixNano(), protocol)
		tag := "{" + run + "}"
		client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addresses, Protocol: protocol})
		label := fmt.Sprintf("resp%d ", protocol)

		must(client.Set(ctx, run+"a", "1", time.Minute).Err())
		got, err := client.Get(ctx, run+"a").Result()
		must(err)
		check(got == "1", got)
		pipe := client.Pipeline()
		for i := range 200 {
			pipe.Set(ctx, run+strconv.Itoa(i), i, 0)
		}
		_, err = pipe.Exec(ctx)
		must(err)
		for i := range 200 {
			got, err := client.Get(ctx, run+strconv.Itoa(i)).Result()
			must(err)
			check(got == strconv.Itoa(i), got)
			must(client.Del(ctx, run+strconv.Itoa(i)).Err())
		}
		ok(label + "strings and pipelines")

		must(client.HSet(ctx, run+"h", "a", 1, "b", 2).Err())
		all, err := client.HGetAll(ctx, run+"h").Result()
		must(err)
		check(len(all) == 2 && all["b"] == "2", all)
		must(client.RPush(ctx, run+"l", 1, 2, 3).Err())
		must(client.SAdd(ctx, tag+"s1", "a", "b").Err())
		must(client.SAdd(ctx, tag+"s2", "b", "c").Err())
		both, err := client.SInter(ctx, tag+"s1", tag+"s2").Result()
		must(err)
		check(len(both) == 1 && both[0] == "b", both)
		must(client.ZAdd(ctx, tag+"z", redis.Z{Score: 1, Member: "one"}, redis.Z{Score: 2.5, Member: "two"}).Err())
		scored, err := client.ZRangeWithScores(ctx, tag+"z", 0, -1).Result()
		must(err)
		check(len(scored) == 2 && scored[1].Score == 2.5, scored)
		must(client.GeoAdd(ctx, run+"geo",
			&redis.GeoLocation{Name: "Palermo", Longitude: 13.361389, Latitude: 38.115556},
			&redis.GeoLocation{Name: "Catania", Longitude: 15.087269, Latitude: 37.502669}).Err())
		far, err := client.GeoDist(ctx, run+"geo", "Palermo", "Catania", "km").Result()
		must(err)
		check(far > 166.27 && far < 166.28, far)
		places, err := client.GeoSearchLocation(ctx, run+"geo", &redis.GeoSearchLocationQuery{
			GeoSearchQuery: redis.GeoSearchQuery{Longitude: 15, Latitude: 37, Radius: 200, RadiusUnit: "km", Sort: "ASC"},
			WithCoord:      true, WithDist: true, WithHash: true}).Result()
		must(err)
		check(len(places) == 2 && places[0].Name == "Catania", places)
		ok(label + "hashes, lists, sets, sorted sets, places")

		first, err := client.XAdd(ctx, &redis.XAddArgs{Stream: tag + "stream", Values: []any{"n", "1"}}).Result()
		must(err)
		must(client.XGroupCreate(ctx, tag+"stream", "g", "0").Err())
		read, err := client.XReadGroup(ctx, &redis.XReadGroupArgs{Group: "g", Consumer: "c", Streams: []string{tag + "stream", ">"}, Count: 10}).Result()
		must(err)
		check(len(read) == 1 && read[0].Messages[0].ID == first, read)
		info, err := client.XInfoStreamFull(ctx, tag+"stream", 10).Result()
		must(err)
		check(info.Length == 1 && info.Groups[0].PelCount == 1, info)
		groups, err := client.XInfoGroups(ctx, tag+"stream").Result()
		must(err)
		check(len(groups) == 1 && groups[0].Pending == 1, groups)
		pending, err := client.XPendingExt(ctx, &redis.XPendingExtArgs{Stream: tag + "stream", Group: "g", Start: "-", End: "+", Count: 10}).Result()
		must(err)
		check(len(pending) == 1 && pending[0].Consumer == "c", pending)
		acked, err := client.XAck(ctx, tag+"stream", "g", first).Result()
		must(err)
		check(acked == 1, acked)
		ok(label + "streams")

		err = client.Watch(ctx, func(tx *redis.Tx) error {
			_, err := tx.TxPipelined(ctx, func(pipe redis.Pipeliner) error {
				pipe.Set(ctx, tag+"t", 1, 0)
				pipe.Incr(ctx, tag+"t")
				return nil
			})
			return err
		}, tag+"t")
		must(err)
		script := redis.NewScript("return {redis.call('GET', KEYS[1]), ARGV[1]}")
		answer, err := script.Run(ctx, client, []string{tag + "t"}, "x").StringSlice()
		must(err)
		check(answer[0] == "2" && answer[1] == "x", answer)
		ok(label + "transactions, scripts")

		listener := client.Subscribe(ctx, run+"channel")
		_, err = listener.Receive(ctx)
		must(err)
		heard := make(chan string, 1)
		go func() {
			message, err := listener.ReceiveMessage(ctx)
			must(err)
			heard <- message.Payload
		}()
		for done := false; !done; {
			must(client.Publish(ctx, run+"channel", "hello").Err())
			select {
			case message := <-heard:
				check(message == "hello", message)
				done = true
			case <-time.After(50 * time.Millisecond):
			}
		}
		must(listener.Close())
		ok(label + "channels")

		popped := make(chan []string, 1)
		go func() {
			got, err := client.BLPop(ctx, 20*time.Second, tag+"queue").Result()
			must(err)
			popped <- got
		}()
		must(client.RPush(ctx, tag+"queue", "job").Err())
		got2 := <-popped
		check(len(got2) == 2 && got2[1] == "job", got2)
		must(client.ForEachMaster(ctx, func(ctx context.Context, node *redis.Client) error {
			return node.Ping(ctx).Err()
		}))
		must(client.ForEachShard(ctx, func(ctx context.Context, node *redis.Client) error {
			return node.Ping(ctx).Err()
		}))
		ok(label + "waiting, every node")
		must(client.Close())
	}
}
