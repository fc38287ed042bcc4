module moim/interop/etcd

go 1.24

require (
	go.etcd.io/etcd/client/v3 v3.5.35
	go.uber.org/zap v1.27.0
)
