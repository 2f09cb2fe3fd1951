package registration

import (
	"fmt"
	"strconv"

	"sluice/router/config"
)

// Announce returns the Announcement of a worker that is described on a command line. The id is not
// part of an Announcement.
func Announce(w *config.Worker) (*Announcement, error) {
	a := &Announcement{
		Version: Version, URL: w.URL, Role: w.Role.String(), Models: w.Models, Ranks: w.Ranks, StartRank: w.StartRank, RankURLs: w.RankURLs, Labels: w.Labels,
		Engine: w.Engine, HealthPath: w.HealthPath, BlockSize: w.BlockSize, KVEvents: w.KVEvents, KVReplay: w.KVReplay, LoadEvents: w.LoadEvents,
		MaxRequests: w.MaxRequests, RankRequests: w.RankRequests, RankTokens: w.RankTokens,
	}
	one := func(key string) string {
		if v := w.Options[key]; len(v) > 0 {
			return v[0]
		}
		return ""
	}
	ports := func(key string) (list []int, err error) {
		for _, v := range w.Options[key] {
			n, err := strconv.ParseUint(v, 10, 16)
			if err != nil || n == 0 {
				return nil, fmt.Errorf("%s: %q; want a port from 1 to 65535", key, v)
			}
			list = append(list, int(n))
		}
		return list, nil
	}
	bootstrap, err := ports("bootstrap_port")
	switch {
	case err != nil:
		return nil, err
	case len(bootstrap) > 1:
		return nil, fmt.Errorf("bootstrap_port: %d ports; want one", len(bootstrap))
	case len(bootstrap) == 1:
		a.Bootstrap = &Bootstrap{Host: one("bootstrap_host"), Port: bootstrap[0]}
	}
	n := &NIXL{Host: one("peer_host"), Connector: one("connector") == "true"}
	if n.InitPorts, err = ports("init_port"); err != nil {
		return nil, err
	}
	if n.AllocPorts, err = ports("alloc_port"); err != nil {
		return nil, err
	}
	if n.Host != "" || n.Connector || n.InitPorts != nil || n.AllocPorts != nil {
		a.NIXL = n
	}
	return a, nil
}
