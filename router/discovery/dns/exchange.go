package dns

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// udpSize is the maximum size of a UDP answer: a datagram of this size passes almost every network
// unfragmented (RFC 9715).
const udpSize = 1232

// send sends one question over UDP, and again over TCP if the answer was truncated. It returns the
// answer records and the additional records, or errNoName for NXDOMAIN.
func (q *query) send(ctx context.Context, name string, typ dnsmessage.Type) (answers, extra []dnsmessage.Resource, err error) {
	ctx, cancel := context.WithTimeout(ctx, q.timeout)
	defer cancel()
	qname, err := fqdn(name)
	if err != nil {
		return nil, nil, err
	}
	var id [2]byte
	rand.Read(id[:])
	question := dnsmessage.Question{Name: qname, Type: typ, Class: dnsmessage.ClassINET}
	packet, err := pack(binary.BigEndian.Uint16(id[:]), question)
	if err != nil {
		return nil, nil, err
	}
	for _, network := range []string{"udp", "tcp"} {
		m, err := exchange(ctx, network, q.server, packet, question)
		switch {
		case err != nil:
			return nil, nil, fmt.Errorf("query to %s: %w", q.server, err)
		case m.Truncated && network == "udp":
			continue
		case m.RCode == dnsmessage.RCodeNameError:
			return nil, nil, errNoName
		case m.RCode != dnsmessage.RCodeSuccess:
			return nil, nil, fmt.Errorf("%s answered %s", q.server, strings.TrimPrefix(m.RCode.String(), "RCode"))
		}
		return m.Answers, m.Additionals, nil
	}
	return nil, nil, fmt.Errorf("%s sent a truncated answer, over TCP too", q.server)
}

func pack(id uint16, question dnsmessage.Question) ([]byte, error) {
	b := dnsmessage.NewBuilder(nil, dnsmessage.Header{ID: id, RecursionDesired: true})
	var opt dnsmessage.ResourceHeader
	steps := []func() error{
		b.StartQuestions,
		func() error { return b.Question(question) },
		b.StartAdditionals,
		func() error { return opt.SetEDNS0(udpSize, dnsmessage.RCodeSuccess, false) },
		func() error { return b.OPTResource(opt, dnsmessage.OPTResource{}) },
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return nil, err
		}
	}
	return b.Finish()
}

// exchange sends a packet and waits for its answer. Over UDP it ignores datagrams that do not
// answer the question, because anyone can send one.
func exchange(ctx context.Context, network, server string, packet []byte, question dnsmessage.Question) (*dnsmessage.Message, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, network, server)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if deadline, ok := ctx.Deadline(); ok {
		if err := c.SetDeadline(deadline); err != nil {
			return nil, err
		}
	}
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if network == "tcp" {
		packet = append(binary.BigEndian.AppendUint16(nil, uint16(len(packet))), packet...)
	}
	if _, err := c.Write(packet); err != nil {
		return nil, err
	}
	if network == "tcp" {
		var size [2]byte
		if _, err := io.ReadFull(c, size[:]); err != nil {
			return nil, err
		}
		answer := make([]byte, binary.BigEndian.Uint16(size[:]))
		if _, err := io.ReadFull(c, answer); err != nil {
			return nil, err
		}
		return unpack(answer, packet[2:], question)
	}
	room := make([]byte, 64<<10)
	for {
		n, err := c.Read(room)
		if err != nil {
			return nil, err
		}
		if m, err := unpack(room[:n], packet, question); err == nil || !errors.Is(err, errOtherAnswer) {
			return m, err
		}
	}
}

var errOtherAnswer = errors.New("it is not an answer to the question")

// unpack parses an answer. It returns errOtherAnswer if the answer does not match the question.
func unpack(answer, packet []byte, question dnsmessage.Question) (*dnsmessage.Message, error) {
	if len(answer) < 12 || !bytes.Equal(answer[:2], packet[:2]) {
		return nil, errOtherAnswer
	}
	m := new(dnsmessage.Message)
	if err := m.Unpack(answer); err != nil {
		return nil, fmt.Errorf("the answer cannot be read: %w", err)
	}
	if !m.Response || len(m.Questions) > 1 || len(m.Questions) == 1 && !same(m.Questions[0], question) {
		return nil, errOtherAnswer
	}
	return m, nil
}

func same(a, b dnsmessage.Question) bool {
	return a.Type == b.Type && a.Class == b.Class && lower(a.Name.String()) == lower(b.Name.String())
}

// systemServers reads /etc/resolv.conf again for each lookup: a laptop changes networks, and a
// node may write the file after the router has started.
func systemServers() ([]string, error) {
	text, err := os.ReadFile("/etc/resolv.conf")
	if err != nil {
		return nil, fmt.Errorf("dns: cannot find a DNS server: %w; want server in discovery.dns", err)
	}
	servers := nameservers(string(text))
	if len(servers) == 0 {
		return nil, errors.New("dns: /etc/resolv.conf names no DNS server; want server in discovery.dns")
	}
	return servers, nil
}

func nameservers(text string) (servers []string) {
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == "nameserver" && len(servers) < 3 {
			servers = append(servers, net.JoinHostPort(f[1], "53"))
		}
	}
	return servers
}
