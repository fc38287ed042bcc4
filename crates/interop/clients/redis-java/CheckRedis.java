// Jedis and Lettuce on a cluster: java CheckRedis jedis|lettuce HOST:PORT,…

import io.lettuce.core.KeyValue;
import io.lettuce.core.ReadFrom;
import io.lettuce.core.RedisURI;
import io.lettuce.core.ScriptOutputType;
import io.lettuce.core.SetArgs;
import io.lettuce.core.StreamMessage;
import io.lettuce.core.XReadArgs;
import io.lettuce.core.cluster.ClusterClientOptions;
import io.lettuce.core.cluster.ClusterTopologyRefreshOptions;
import io.lettuce.core.cluster.RedisClusterClient;
import io.lettuce.core.cluster.api.StatefulRedisClusterConnection;
import io.lettuce.core.cluster.api.sync.RedisAdvancedClusterCommands;
import io.lettuce.core.cluster.pubsub.StatefulRedisClusterPubSubConnection;
import io.lettuce.core.pubsub.RedisPubSubAdapter;
import io.lettuce.core.protocol.ProtocolVersion;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import redis.clients.jedis.HostAndPort;
import redis.clients.jedis.JedisPubSub;
import redis.clients.jedis.RedisClusterClient.Builder;
import redis.clients.jedis.StreamEntryID;
import redis.clients.jedis.args.GeoUnit;
import redis.clients.jedis.params.XReadGroupParams;

public class CheckRedis {
  static void ok(String step) {
    System.out.println("ok " + step);
  }

  static void check(boolean right, Object what) {
    if (!right) {
      throw new AssertionError(String.valueOf(what));
    }
  }

  static final String RUN = "java-" + UUID.randomUUID().toString().substring(0, 8);

  public static void main(String[] args) throws Exception {
    if (args[0].equals("jedis")) {
      jedis(args[1]);
    } else {
      for (ProtocolVersion version : new ProtocolVersion[] {ProtocolVersion.RESP2, ProtocolVersion.RESP3}) {
        lettuce(args[1], version);
      }
    }
    System.exit(0);
  }

  static void jedis(String addresses) throws Exception {
    Set<HostAndPort> nodes = new HashSet<>();
    for (String address : addresses.split(",")) {
      nodes.add(HostAndPort.from(address));
    }
    Builder builder = redis.clients.jedis.RedisClusterClient.builder();
    try (redis.clients.jedis.RedisClusterClient client = builder.nodes(nodes).build()) {
      String tag = "{" + RUN + "}";
      check(client.set(RUN + "a", "1").equals("OK") && client.get(RUN + "a").equals("1"), "a string");
      for (int i = 0; i < 200; i++) {
        client.set(RUN + i, String.valueOf(i));
      }
      for (int i = 0; i < 200; i++) {
        check(client.get(RUN + i).equals(String.valueOf(i)), i);
        client.del(RUN + i);
      }
      check(client.incrBy(RUN + "n", 5) == 5, "a counter");
      ok("strings");

      client.hset(RUN + "h", Map.of("a", "1", "b", "2"));
      check(client.hgetAll(RUN + "h").equals(Map.of("a", "1", "b", "2")), "a hash");
      client.rpush(RUN + "l", "1", "2", "3");
      check(client.lrange(RUN + "l", 0, -1).equals(List.of("1", "2", "3")), "a list");
      client.sadd(tag + "s1", "a", "b");
      client.sadd(tag + "s2", "b", "c");
      check(client.sinter(tag + "s1", tag + "s2").equals(Set.of("b")), "sets");
      client.zadd(tag + "z", Map.of("one", 1.0, "two", 2.5));
      check(client.zrange(tag + "z", 0, -1).equals(List.of("one", "two")), "a sorted set");
      check(client.zscore(tag + "z", "two") == 2.5, "a score");
      client.geoadd(RUN + "geo", 13.361389, 38.115556, "Palermo");
      client.geoadd(RUN + "geo", 15.087269, 37.502669, "Catania");
      double far = client.geodist(RUN + "geo", "Palermo", "Catania", GeoUnit.KM);
      check(far > 166.27 && far < 166.28, far);
      ok("hashes, lists, sets, sorted sets, places");

      StreamEntryID first = client.xadd(tag + "stream", StreamEntryID.NEW_ENTRY, Map.of("n", "1"));
      client.xgroupCreate(tag + "stream", "g", new StreamEntryID("0-0"), false);
      var read =
          client.xreadGroup(
              "g", "c", XReadGroupParams.xReadGroupParams().count(10),
              Map.of(tag + "stream", StreamEntryID.XREADGROUP_UNDELIVERED_ENTRY));
      check(read.get(0).getValue().get(0).getID().equals(first), read);
      check(client.xpending(tag + "stream", "g").getTotal() == 1, "pending");
      check(client.xack(tag + "stream", "g", first) == 1, "acknowledged");
      ok("streams");

      client.set(tag + "t", "2");
      Object answer = client.eval("return {redis.call('GET', KEYS[1]), ARGV[1]}", List.of(tag + "t"), List.of("x"));
      check(answer.equals(List.of("2", "x")), answer);
      ok("scripts");

      CompletableFuture<String> heard = new CompletableFuture<>();
      JedisPubSub listener =
          new JedisPubSub() {
            @Override
            public void onMessage(String channel, String message) {
              heard.complete(message);
            }
          };
      Thread thread = new Thread(() -> client.subscribe(listener, RUN + "channel"));
      thread.setDaemon(true);
      thread.start();
      String message = null;
      for (int i = 0; message == null && i < 400; i++) {
        client.publish(RUN + "channel", "hello");
        try {
          message = heard.get(50, TimeUnit.MILLISECONDS);
        } catch (TimeoutException again) {
          continue;
        }
      }
      check("hello".equals(message), message);
      listener.unsubscribe();
      client.rpush(tag + "queue", "job");
      check(client.blpop(20, tag + "queue").equals(List.of(tag + "queue", "job")), "a job");
      ok("channels, waiting");
    }
  }

  static void lettuce(String addresses, ProtocolVersion version) throws Exception {
    String label = version + " ";
    List<RedisURI> nodes = new ArrayList<>();
    for (String address : addresses.split(",")) {
      nodes.add(RedisURI.create("redis://" + address));
    }
    RedisClusterClient client = RedisClusterClient.create(nodes);
    client.setOptions(
        ClusterClientOptions.builder()
            .protocolVersion(version)
            .topologyRefreshOptions(ClusterTopologyRefreshOptions.builder().enableAllAdaptiveRefreshTriggers().build())
            .build());
    StatefulRedisClusterConnection<String, String> connection = client.connect();
    connection.setTimeout(Duration.ofSeconds(30));
    RedisAdvancedClusterCommands<String, String> sync = connection.sync();
    String run = RUN + version;
    String tag = "{" + run + "}";

    check(sync.set(run + "a", "1", SetArgs.Builder.ex(60)).equals("OK") && sync.get(run + "a").equals("1"), "a string");
    Map<String, String> many = new HashMap<>();
    for (int i = 0; i < 200; i++) {
      many.put(run + i, String.valueOf(i));
    }
    sync.mset(many);
    List<KeyValue<String, String>> values = sync.mget(many.keySet().toArray(new String[0]));
    check(values.size() == 200 && values.stream().allMatch(KeyValue::hasValue), values.size());
    check(sync.del(many.keySet().toArray(new String[0])) == 200, "deleted");
    ok(label + "strings over all slots");

    sync.hset(run + "h", Map.of("a", "1", "b", "2"));
    check(sync.hgetall(run + "h").equals(Map.of("a", "1", "b", "2")), "a hash");
    sync.rpush(run + "l", "1", "2", "3");
    check(sync.lrange(run + "l", 0, -1).equals(List.of("1", "2", "3")), "a list");
    sync.sadd(tag + "s1", "a", "b");
    sync.sadd(tag + "s2", "b", "c");
    check(sync.sinter(tag + "s1", tag + "s2").equals(new LinkedHashSet<>(List.of("b"))), "sets");
    sync.zadd(tag + "z", 1.0, "one");
    sync.zadd(tag + "z", 2.5, "two");
    check(sync.zrangeWithScores(tag + "z", 0, -1).get(1).getScore() == 2.5, "a score");
    sync.geoadd(run + "geo", 13.361389, 38.115556, "Palermo", 15.087269, 37.502669, "Catania");
    check(sync.geopos(run + "geo", "Palermo", "unknown").size() == 2, "places");
    ok(label + "hashes, lists, sets, sorted sets, places");

    String first = sync.xadd(tag + "stream", Map.of("n", "1"));
    sync.xgroupCreate(XReadArgs.StreamOffset.from(tag + "stream", "0-0"), "g");
    List<StreamMessage<String, String>> read =
        sync.xreadgroup(io.lettuce.core.Consumer.from("g", "c"), XReadArgs.StreamOffset.lastConsumed(tag + "stream"));
    check(read.size() == 1 && read.get(0).getId().equals(first), read);
    check(sync.xpending(tag + "stream", "g").getCount() == 1, "pending");
    check(sync.xack(tag + "stream", "g", first) == 1, "acknowledged");
    ok(label + "streams");

    List<Object> both =
        sync.eval("return {redis.call('SET', KEYS[1], '2').ok, ARGV[1]}", ScriptOutputType.MULTI, new String[] {tag + "t"}, "x");
    check(both.equals(List.of("OK", "x")), both);
    String sha = sync.scriptLoad("return redis.call('GET', KEYS[1])");
    check("2".equals(sync.evalsha(sha, ScriptOutputType.VALUE, tag + "t")), "a script by its name");
    ok(label + "scripts on all nodes");

    StatefulRedisClusterPubSubConnection<String, String> listener = client.connectPubSub();
    CompletableFuture<String> heard = new CompletableFuture<>();
    listener.addListener(
        new RedisPubSubAdapter<String, String>() {
          @Override
          public void message(String channel, String message) {
            heard.complete(message);
          }
        });
    listener.sync().subscribe(run + "channel");
    String message = null;
    for (int i = 0; message == null && i < 400; i++) {
      sync.publish(run + "channel", "hello");
      try {
        message = heard.get(50, TimeUnit.MILLISECONDS);
      } catch (TimeoutException again) {
        continue;
      }
    }
    check("hello".equals(message), message);
    ok(label + "channels");

    // One node has none.
    boolean hasReplicas =
        connection.getPartitions().stream().anyMatch(node -> node.getRole().isReplica());
    connection.setReadFrom(hasReplicas ? ReadFrom.ANY_REPLICA : ReadFrom.REPLICA_PREFERRED);
    String found = null;
    for (int i = 0; found == null && i < 400; i++) {
      found = sync.get(tag + "t");
    }
    check("2".equals(found), "from a replica: " + found);
    check(sync.keys(tag + "*").contains(tag + "t"), "keys of all nodes");
    ok(label + "replicas");
    listener.close();
    connection.close();
    client.shutdown(Duration.ZERO, Duration.ofSeconds(1));
  }
}
