package nixl

import "testing"

func TestActiveReportsReason(t *testing.T) {
	tier, why := Active()
	if tier != TierHTTP || why == "" {
		t.Errorf("Active() = %q, %q; want the http tier and a reason", tier, why)
	}
}
