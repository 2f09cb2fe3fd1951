package sim

func newResponsesFormat(j *job) format { return &chatFormat{j: j} }
func newMessagesFormat(j *job) format  { return &chatFormat{j: j} }
