// Package session knows which requests belong to one session of an agent or a chat, where the
// session's KV is, and how much KV the sessions in use need.
//
// A session is recognised by a header or a member of the body that clients send anyway (FromHeaders,
// FromBody). Its id is scoped to a tenant, the name of the client's API key or what a trusted client
// names in its place, and only a salted hash of both is kept. The Table is bounded, and forgets a session that has not been used for a while.
//
// What the Table knows is a hint: the scheduler uses it between ranks that are equal in cached tokens
// and in waiting work. When a session is finished, the blocks that only it used can be forgotten.
//
// If the sessions in use need more KV than the fleet has, each turn finds its KV evicted by the
// others. The Table then limits how many sessions are active, if Options.LimitActive is set: an
// active session keeps its place between its turns for Options.Hold, and the next turns of the
// others wait (Table.Start), for at most Options.MaxWait. They wait in the admission queue: the Table
// only says whose turn may go on.
package session
