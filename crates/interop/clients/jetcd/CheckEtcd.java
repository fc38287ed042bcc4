// jetcd: java CheckEtcd HOST:PORT,…

import static java.nio.charset.StandardCharsets.UTF_8;

import io.etcd.jetcd.ByteSequence;
import io.etcd.jetcd.Client;
import io.etcd.jetcd.KV;
import io.etcd.jetcd.op.Cmp;
import io.etcd.jetcd.op.CmpTarget;
import io.etcd.jetcd.op.Op;
import io.etcd.jetcd.options.DeleteOption;
import io.etcd.jetcd.options.GetOption;
import io.etcd.jetcd.options.LeaseOption;
import io.etcd.jetcd.options.PutOption;
import io.etcd.jetcd.options.WatchOption;
import java.net.URI;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.ArrayBlockingQueue;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;

public class CheckEtcd {
    static final String RUN = "jetcd-" + Long.toHexString(System.nanoTime()) + "/";

    static void ok(String step) {
        System.out.println("ok " + step);
    }

    static void check(boolean holds, Object message) {
        if (!holds) {
            throw new AssertionError(message);
        }
    }

    static ByteSequence key(String name) {
        return ByteSequence.from(RUN + name, UTF_8);
    }

    static ByteSequence bytes(String text) {
        return ByteSequence.from(text, UTF_8);
    }

    static <T> T get(CompletableFuture<T> future) throws Exception {
        return future.get(30, TimeUnit.SECONDS);
    }

    public static void main(String[] args) throws Exception {
        List<URI> endpoints = new ArrayList<>();
        for (String endpoint : args[0].split(",")) {
            endpoints.add(URI.create("http://" + endpoint));
        }
        try (Client client = Client.builder().endpoints(endpoints).build()) {
            kv(client);
            txn(client);
            watch(client);
            lease(client);
            lock(client);
            election(client);
            maintenance(client, endpoints);
        }
        System.exit(0); // its threads would linger
    }

    static void kv(Client client) throws Exception {
        KV kv = client.getKVClient();
        for (int i = 0; i < 20; i++) {
            get(kv.put(key(String.format("k%02d", i)), bytes("" + i)));
        }
        var all = get(kv.get(key("k"), GetOption.builder().isPrefix(true).withLimit(5).build()));
        check(all.getCount() == 20 && all.isMore() && all.getKvs().size() == 5, all);
        var before = get(kv.put(key("k00"), bytes("new"), PutOption.builder().withPrevKV().build()));
        check(before.getPrevKv().getValue().equals(bytes("0")), before);
        var gone = get(kv.delete(key("k"), DeleteOption.builder().isPrefix(true).build()));
        check(gone.getDeleted() == 20, gone);
        ok("kv");
    }

    static void txn(Client client) throws Exception {
        KV kv = client.getKVClient();
        for (boolean first : new boolean[] {true, false}) {
            var done = get(kv.txn()
                .If(new Cmp(key("t"), Cmp.Op.EQUAL, CmpTarget.version(0)))
                .Then(Op.put(key("t"), bytes("1"), PutOption.DEFAULT))
                .Else(Op.get(key("t"), GetOption.DEFAULT))
                .commit());
            check(done.isSucceeded() == first, done);
            check(first || done.getGetResponses().get(0).getKvs().get(0).getValue().equals(bytes("1")), done);
        }
        ok("txn");
    }

    static void watch(Client client) throws Exception {
        BlockingQueue<String> seen = new ArrayBlockingQueue<>(100);
        long revision = get(client.getKVClient().put(key("w/before"), bytes("x"))).getHeader().getRevision();
        WatchOption option = WatchOption.builder().isPrefix(true).withRevision(revision + 1).withPrevKV(true).build();
        try (var watcher = client.getWatchClient().watch(key("w/"), option, response ->
                response.getEvents().forEach(event ->
                    seen.add(event.getEventType() + " " + event.getKeyValue().getValue().toString(UTF_8))))) {
            get(client.getKVClient().put(key("w/k"), bytes("1")));
            get(client.getKVClient().put(key("w/k"), bytes("2")));
            get(client.getKVClient().delete(key("w/k")));
            for (String expected : Arrays.asList("PUT 1", "PUT 2", "DELETE ")) {
                String event = seen.poll(20, TimeUnit.SECONDS);
                check(expected.equals(event), event);
            }
        }
        ok("watch");
    }

    static void lease(Client client) throws Exception {
        long lease = get(client.getLeaseClient().grant(30)).getID();
        get(client.getKVClient().put(key("leased"), bytes("x"), PutOption.builder().withLeaseId(lease).build()));
        check(get(client.getLeaseClient().keepAliveOnce(lease)).getTTL() == 30, "renewal");
        var left = get(client.getLeaseClient().timeToLive(lease, LeaseOption.builder().withAttachedKeys().build()));
        check(left.getGrantedTTL() == 30 && left.getKeys().size() == 1, left);
        get(client.getLeaseClient().revoke(lease));
        check(get(client.getKVClient().get(key("leased"))).getCount() == 0, "a key outlives its lease");
        ok("lease");
    }

    static void lock(Client client) throws Exception {
        long one = get(client.getLeaseClient().grant(30)).getID();
        long two = get(client.getLeaseClient().grant(30)).getID();
        var held = get(client.getLockClient().lock(key("lock"), one));
        var waiting = client.getLockClient().lock(key("lock"), two);
        try {
            waiting.get(500, TimeUnit.MILLISECONDS);
            throw new AssertionError("two holders");
        } catch (TimeoutException expected) {
            // it waits
        }
        get(client.getLockClient().unlock(held.getKey()));
        get(client.getLockClient().unlock(get(waiting).getKey()));
        ok("lock");
    }

    static void election(Client client) throws Exception {
        long lease = get(client.getLeaseClient().grant(30)).getID();
        var won = get(client.getElectionClient().campaign(key("election"), lease, bytes("one")));
        check(get(client.getElectionClient().leader(key("election"))).getKv().getValue().equals(bytes("one")), "leader");
        get(client.getElectionClient().proclaim(won.getLeader(), bytes("two")));
        check(get(client.getElectionClient().leader(key("election"))).getKv().getValue().equals(bytes("two")), "leader");
        get(client.getElectionClient().resign(won.getLeader()));
        ok("election");
    }

    static void maintenance(Client client, List<URI> endpoints) throws Exception {
        check(get(client.getClusterClient().listMember()).getMembers().size() == endpoints.size(), "members");
        check(get(client.getMaintenanceClient().listAlarms()).getAlarms().isEmpty(), "alarms");
        for (URI endpoint : endpoints) {
            var status = get(client.getMaintenanceClient().statusMember(endpoint.toString()));
            check(status.getLeader() != 0, status);
            get(client.getMaintenanceClient().defragmentMember(endpoint.toString()));
        }
        ok("members, maintenance");
    }
}
