module moim/interop/franz

go 1.24

require (
	github.com/twmb/franz-go v1.20.5
	github.com/twmb/franz-go/pkg/kadm v1.17.1
)
