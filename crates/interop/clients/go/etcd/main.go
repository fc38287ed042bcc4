// clientv3 and its recipes: etcd HOST:PORT,…
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.etcd.io/etcd/client/v3/leasing"
	"go.etcd.io/etcd/client/v3/namespace"
	"go.etcd.io/etcd/client/v3/ordering"
	"go.uber.org/zap"
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

func connect() *clientv3.Client { return connectTo(strings.Split(os.Args[1], ",")) }

func connectTo(endpoints []string) *clientv3.Client {
	client, err := clientv3.New(clientv3.Config{
		Endpoints: endpoints, DialTimeout: 10 * time.Second,
		Logger: zap.NewNop(), DialKeepAliveTime: time.Second, DialKeepAliveTimeout: 3 * time.Second,
	})
	must(err, "client")
	return client
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	client := connect()
	defer client.Close()
	run := fmt.Sprintf("go-%x/", time.Now().UnixNano())
	kv(ctx, client, run)
	txn(ctx, client, run)
	watch(ctx, client, run)
	lease(ctx, client, run)
	mutex(ctx, run)
	election(ctx, run)
	stm(ctx, run)
	wrappers(ctx, client, run)
	maintenance(ctx, client)
	refusals(ctx, client, run)
}

func kv(ctx context.Context, client *clientv3.Client, run string) {
	put, err := client.Put(ctx, run+"a", "1")
	must(err, "put")
	for i := range 50 {
		_, err := client.Put(ctx, fmt.Sprintf("%sk%02d", run, i), strconv.Itoa(i))
		must(err, "put")
	}
	get, err := client.Get(ctx, run+"k", clientv3.WithPrefix(), clientv3.WithLimit(10),
		clientv3.WithSort(clientv3.SortByKey, clientv3.SortDescend))
	must(err, "get")
	check(get.Count == 50 && get.More && len(get.Kvs) == 10 && string(get.Kvs[0].Value) == "49", "get: %v", get)
	get, err = client.Get(ctx, run+"a", clientv3.WithRev(put.Header.Revision), clientv3.WithSerializable())
	must(err, "get of a revision")
	check(string(get.Kvs[0].Value) == "1", "get of a revision: %v", get)
	gone, err := client.Delete(ctx, run+"k", clientv3.WithPrefix(), clientv3.WithPrevKV())
	must(err, "delete")
	check(gone.Deleted == 50 && len(gone.PrevKvs) == 50, "delete: %v", gone.Deleted)
	ok("kv")
}

func txn(ctx context.Context, client *clientv3.Client, run string) {
	txn := func() *clientv3.TxnResponse {
		response, err := client.Txn(ctx).
			If(clientv3.Compare(clientv3.Version(run+"txn"), "=", 0)).
			Then(clientv3.OpPut(run+"txn", "1"), clientv3.OpTxn(nil, []clientv3.Op{clientv3.OpGet(run + "txn")}, nil)).
			Else(clientv3.OpGet(run + "txn")).
			Commit()
		must(err, "txn")
		return response
	}
	first, second := txn(), txn()
	check(first.Succeeded && len(first.Responses) == 2, "txn: %v", first)
	check(string(first.Responses[1].GetResponseTxn().Responses[0].GetResponseRange().Kvs[0].Value) == "1", "nested: %v", first)
	check(!second.Succeeded && string(second.Responses[0].GetResponseRange().Kvs[0].Value) == "1", "txn: %v", second)
	ok("txn")
}

func watch(ctx context.Context, client *clientv3.Client, run string) {
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	events := client.Watch(ctx, run+"w/", clientv3.WithPrefix(), clientv3.WithPrevKV(), clientv3.WithCreatedNotify())
	created := <-events
	check(created.Created, "created: %v", created)
	first, err := client.Put(ctx, run+"w/k", "0")
	must(err, "put")
	for i := 1; i < 100; i++ {
		_, err := client.Put(ctx, run+"w/k", strconv.Itoa(i))
		must(err, "put")
	}
	for seen := 0; seen < 100; {
		response, open := <-events
		check(open && response.Err() == nil, "watch ended: %v", response.Err())
		for _, event := range response.Events {
			check(string(event.Kv.Value) == strconv.Itoa(seen), "event %d: %v", seen, event)
			check(seen == 0 || string(event.PrevKv.Value) == strconv.Itoa(seen-1), "before event %d: %v", seen, event)
			seen++
		}
	}
	replay := client.Watch(ctx, run+"w/k", clientv3.WithRev(first.Header.Revision+50))
	response := <-replay
	check(string(response.Events[0].Kv.Value) == "50", "replay: %v", response)
	must(client.RequestProgress(ctx), "progress")
	ok("watch")
}

func lease(ctx context.Context, client *clientv3.Client, run string) {
	short, err := client.Grant(ctx, 2)
	must(err, "grant")
	kept, err := client.Grant(ctx, 2)
	must(err, "grant")
	_, err = client.Put(ctx, run+"short", "x", clientv3.WithLease(short.ID))
	must(err, "put")
	_, err = client.Put(ctx, run+"kept", "x", clientv3.WithLease(kept.ID))
	must(err, "put")
	alive, err := client.KeepAlive(ctx, kept.ID)
	must(err, "keep alive")
	check((<-alive).TTL == 2, "the answer of a renewal")
	gone := client.Watch(ctx, run+"short", clientv3.WithFilterPut())
	response := <-gone
	check(response.Events[0].Type == clientv3.EventTypeDelete, "the end of a lease: %v", response)
	get, err := client.Get(ctx, run+"kept")
	must(err, "get")
	check(len(get.Kvs) == 1, "a renewed lease has ended")
	left, err := client.TimeToLive(ctx, kept.ID, clientv3.WithAttachedKeys())
	must(err, "time to live")
	check(left.GrantedTTL == 2 && len(left.Keys) == 1, "time to live: %v", left)
	_, err = client.Revoke(ctx, kept.ID)
	must(err, "revoke")
	ok("lease")
}

func mutex(ctx context.Context, run string) {
	var total int
	var workers sync.WaitGroup
	inside := make(chan struct{}, 1)
	for range 4 {
		workers.Add(1)
		go func() {
			defer workers.Done()
			client := connect()
			defer client.Close()
			session, err := concurrency.NewSession(client, concurrency.WithTTL(10))
			must(err, "session")
			defer session.Close()
			mutex := concurrency.NewMutex(session, run+"mutex")
			for range 5 {
				must(mutex.Lock(ctx), "lock")
				select {
				case inside <- struct{}{}:
				default:
					check(false, "two holders")
				}
				total++
				<-inside
				must(mutex.Unlock(ctx), "unlock")
			}
		}()
	}
	workers.Wait()
	check(total == 20, "locked %d times", total)
	client := connect()
	defer client.Close()
	one, err := concurrency.NewSession(client)
	must(err, "session")
	two, err := concurrency.NewSession(client)
	must(err, "session")
	held := concurrency.NewMutex(one, run+"try")
	must(held.TryLock(ctx), "try lock")
	err = concurrency.NewMutex(two, run+"try").TryLock(ctx)
	check(errors.Is(err, concurrency.ErrLocked), "try lock of a held one: %v", err)
	must(one.Close(), "close")
	must(concurrency.NewMutex(two, run+"try").Lock(ctx), "lock after the session has ended")
	ok("mutex")
}

func election(ctx context.Context, run string) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	client := connect()
	defer client.Close()
	one, err := concurrency.NewSession(client)
	must(err, "session")
	two, err := concurrency.NewSession(client)
	must(err, "session")
	first, second := concurrency.NewElection(one, run+"election"), concurrency.NewElection(two, run+"election")
	must(first.Campaign(ctx, "one"), "campaign")
	won := make(chan error, 1)
	go func() { won <- second.Campaign(ctx, "two") }()
	observed := second.Observe(ctx)
	check(string((<-observed).Kvs[0].Value) == "one", "the first leader")
	must(first.Proclaim(ctx, "one again"), "proclaim")
	check(string((<-observed).Kvs[0].Value) == "one again", "its word")
	must(first.Resign(ctx), "resign")
	must(<-won, "campaign of the second")
	leader, err := first.Leader(ctx)
	must(err, "leader")
	check(string(leader.Kvs[0].Value) == "two", "the second leader: %v", leader)
	ok("election")
}

func stm(ctx context.Context, run string) {
	// It reads revisions without a quorum: from a node that is behind they would be refused.
	client := connectTo(strings.Split(os.Args[1], ",")[:1])
	defer client.Close()
	for _, account := range []string{"x", "y"} {
		_, err := client.Put(ctx, run+"account/"+account, "100")
		must(err, "put")
	}
	var workers sync.WaitGroup
	for i := range 4 {
		workers.Add(1)
		go func() {
			defer workers.Done()
			for j := range 10 {
				from, to := run+"account/x", run+"account/y"
				if (i+j)%2 == 0 {
					from, to = to, from
				}
				_, err := concurrency.NewSTM(client, func(s concurrency.STM) error {
					a, _ := strconv.Atoi(s.Get(from))
					b, _ := strconv.Atoi(s.Get(to))
					s.Put(from, strconv.Itoa(a-7))
					s.Put(to, strconv.Itoa(b+7))
					return nil
				}, concurrency.WithIsolation(concurrency.SerializableSnapshot))
				must(err, "transfer")
			}
		}()
	}
	workers.Wait()
	get, err := client.Get(ctx, run+"account/", clientv3.WithPrefix())
	must(err, "get")
	a, _ := strconv.Atoi(string(get.Kvs[0].Value))
	b, _ := strconv.Atoi(string(get.Kvs[1].Value))
	check(a+b == 200, "money: %d and %d", a, b)
	ok("stm")
}

func wrappers(ctx context.Context, client *clientv3.Client, run string) {
	inside := namespace.NewKV(client.KV, run+"ns/")
	_, err := inside.Put(ctx, "k", "v")
	must(err, "namespace")
	get, err := client.Get(ctx, run+"ns/k")
	must(err, "get")
	check(len(get.Kvs) == 1, "namespace: %v", get)
	cached, closing, err := leasing.NewKV(client, run+"leasing/")
	must(err, "leasing")
	defer closing()
	_, err = client.Put(ctx, run+"cached", "1")
	must(err, "put")
	for range 3 {
		get, err = cached.Get(ctx, run+"cached")
		must(err, "leasing get")
		check(string(get.Kvs[0].Value) == "1", "leasing: %v", get)
	}
	_, err = cached.Put(ctx, run+"cached", "2")
	must(err, "leasing put")
	ordered := ordering.NewKV(client.KV, func(clientv3.Op, clientv3.OpResponse, int64) error { return nil })
	_, err = ordered.Get(ctx, run+"cached")
	must(err, "ordering")
	ok("namespace, leasing, ordering")
}

func maintenance(ctx context.Context, client *clientv3.Client) {
	members, err := client.MemberList(ctx)
	must(err, "member list")
	check(len(members.Members) == len(strings.Split(os.Args[1], ",")), "members: %v", members)
	must(client.Sync(ctx), "sync")
	for _, endpoint := range client.Endpoints() {
		status, err := client.Status(ctx, endpoint)
		must(err, "status")
		check(status.Leader != 0 && status.RaftTerm > 0, "status: %v", status)
		_, err = client.HashKV(ctx, endpoint, 0)
		must(err, "hash")
	}
	alarms, err := client.AlarmList(ctx)
	must(err, "alarms")
	check(len(alarms.Alarms) == 0, "alarms: %v", alarms)
	ok("maintenance")
}

func refusals(ctx context.Context, client *clientv3.Client, run string) {
	_, err := client.Get(ctx, run, clientv3.WithRev(1<<40))
	check(errors.Is(err, rpctypes.ErrFutureRev), "a future revision: %v", err)
	_, err = client.Put(ctx, run, "x", clientv3.WithLease(0x123))
	check(errors.Is(err, rpctypes.ErrLeaseNotFound), "an unknown lease: %v", err)
	_, err = client.Put(ctx, run, strings.Repeat("x", 1600<<10))
	check(errors.Is(err, rpctypes.ErrRequestTooLarge), "a large request: %v", err)
	_, err = client.Put(ctx, "", "x")
	check(errors.Is(err, rpctypes.ErrEmptyKey), "an empty key: %v", err)
	_, err = client.Txn(ctx).Then(clientv3.OpPut(run, "1"), clientv3.OpPut(run, "2")).Commit()
	check(errors.Is(err, rpctypes.ErrDuplicateKey), "a duplicate key: %v", err)
	ok("refusals")
}
