package textgen

// wordList is the words of the simulated models. Its order determines the token ids: a
// change invalidates every golden file and every trace of token ids.
const wordList = `the of and to a in is that for it as with on be at by this from or an are was which have not they
you all will can more when there one other about into some time has two could them than first been
its who now people my made over did down only way find use may water long little very after words
called just where most know get through back much before go good new write our me man too any day
same right look think also around another came come work three word must because does part even
place well such here take why things help put years different away again off went old number great
tell men say small every found still between name should home big give air line set own under read
last never us left end along while might next sound below saw something thought both few those
always looked show large often together asked house world going want school important until form
food keep children feet land side without boy once animals life enough took sometimes four head
above kind began almost live page got earth need far hand high year mother light parts country
father let night following picture being study second eyes soon times story boys since white days
ever paper hard near sentence better best across during today others however sure means knew try
told young miles sun ways thing whole hear example heard several change answer room sea against top
turned learn point city play toward five using himself usually money seen car morning given trees
state engine token cache block request stream model prefill decode router worker memory batch queue
server client data value index prefix context system network transfer result question reason simple
clear exact quick slow early late open closed full empty deep wide narrow strong gentle quiet river
mountain forest garden window door table bread stone wind rain snow summer winter spring autumn
music letter color shape north south east west measure count order plan path step rule law idea mind
heart voice silence friend`
