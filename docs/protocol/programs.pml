/* How the programs of a kernel share an edge (gfdit/kernels/push_exchange.py): two ranks, two programs each.
 *
 * An operation is one launch on each rank. It has one or two rounds, and one or two chunks a round: program c handles
 * chunk c. A round is one instance of the edge; its payload and token lie in the slot of the instance's parity, one
 * place per chunk. Programs run at their own pace. Each reads the edge's counter when it starts; the last one to
 * finish advances it, and only then does the next launch of that rank begin (stream order). The last round of an
 * operation has a payload for the first chunk only, as at the end of a message, but tokens for all chunks.
 *
 * SPIN chooses every sequence of OPERATIONS operations and explores every interleaving.
 *
 * Properties: no deadlock, no payload overwritten before it was read or read before it was written.
 * Mutants, by -D: SHORT_LAST_ROUND (no token for a chunk without payload), EARLY_LAUNCH (the next launch does not wait
 * for the rank's other program), ONE_SLOT, NO_TICKET (every program advances the counter when it is done).
 */
#ifndef OPERATIONS
#define OPERATIONS 3
#endif
#ifdef ONE_SLOT
#define SLOT(n) 0
#else
#define SLOT(n) ((n) % 2)
#endif

byte rounds[OPERATIONS];
byte chunks[OPERATIONS];
byte counter[2];   /* instances used on the edge, as each rank counts; both directions alike */
byte launched[2];  /* operations begun */
byte running[2];   /* programs of the current launch that have not finished */
byte token[8];     /* [to][slot][chunk] */
byte payload[8];

#define PLACE(to, n, chunk) ((to) * 4 + SLOT(n) * 2 + (chunk))

proctype Program(byte me; byte chunk) {
    byte operation = 0, step, base, n;
    do
    :: operation == OPERATIONS -> break
    :: operation < OPERATIONS ->
        /* The launch: both programs of a rank start with the same counter. */
        launched[me] > operation;
        base = counter[me];
        step = 0;
        do
        :: step == rounds[operation] || chunk >= chunks[operation] -> break
        :: else ->
            n = base + step + 1;
            if
            :: chunk == 0 || step + 1 < rounds[operation] || rounds[operation] == 1 ->
                payload[PLACE(1 - me, n, chunk)] = n;
                token[PLACE(1 - me, n, chunk)] = n;
                token[PLACE(me, n, chunk)] >= n;
                assert(token[PLACE(me, n, chunk)] == n);
                assert(payload[PLACE(me, n, chunk)] == n)
            :: else ->
#ifdef SHORT_LAST_ROUND
                skip
#else
                token[PLACE(1 - me, n, chunk)] = n;
                token[PLACE(me, n, chunk)] >= n;
                assert(token[PLACE(me, n, chunk)] == n)
#endif
            fi;
            step++
        od;
        atomic {
            running[me]--;
#ifdef NO_TICKET
            counter[me] = counter[me] + rounds[operation];
#else
            if
            :: running[me] == 0 -> counter[me] = base + rounds[operation]
            :: else -> skip
            fi;
#endif
#ifdef EARLY_LAUNCH
            if
            :: launched[me] == operation + 1 && launched[me] < OPERATIONS ->
                counter[me] = base + rounds[operation]; launched[me]++; running[me] = running[me] + 2
            :: else -> skip
            fi;
#else
            if
            :: running[me] == 0 && launched[me] < OPERATIONS -> launched[me]++; running[me] = 2
            :: else -> skip
            fi;
#endif
            operation++
        }
    od
}

init {
    byte position = 0, number;
    do
    :: position == OPERATIONS -> break
    :: position < OPERATIONS ->
        select (number : 1 .. 2);
        rounds[position] = number;
        select (number : 1 .. 2);
        chunks[position] = number;
        position++
    od;
    atomic {
        launched[0] = 1; launched[1] = 1; running[0] = 2; running[1] = 2;
        run Program(0, 0); run Program(0, 1); run Program(1, 0); run Program(1, 1)
    }
}
