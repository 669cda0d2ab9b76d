/* Stop strings over streamed text: Aho and Corasick's automaton, for the matcher alone and for the output parser.
 *
 * The strings form a trie. `fail` of a node leads to the longest proper suffix of its path that is in the trie too, so
 * that the current node is always the longest suffix of the text that may still become a stop string. What is held back
 * is therefore the path of that node, and since every path is the beginning of some stop string, it needs no buffer:
 * the bytes are read from the copy of that string. Of "aab" and "ab": root -a-> 1 -a-> 2 -b-> 3 (hit 0)      fail: 2 ->
 * 1, 3 -> 4 1 -b-> 4 (hit 1) */
#include "stop.h"

static size_t child_of(const di_stop_matcher *m, size_t node, uint8_t byte) {
    size_t child = m->nodes[node].first_child;
    while (child != 0 && m->nodes[child].byte != byte) {
        child = m->nodes[child].sibling;
    }
    return child; /* the root is nobody's child: 0 = none */
}

/* Puts one string into the trie. at = its place in m->bytes. */
static void insert(di_stop_matcher *m, size_t at, size_t len, size_t stop_id) {
    size_t node = 0;
    for (size_t i = 0; i < len; i++) {
        uint8_t byte = (uint8_t)m->bytes[at + i];
        size_t child = child_of(m, node, byte);
        if (child == 0) {
            child = m->n_nodes++;
            m->nodes[child] = (di_stop_node){
                .path_at = at, .depth = i + 1, .sibling = m->nodes[node].first_child, .byte = byte, .hit = -1};
            m->nodes[node].first_child = child;
        }
        node = child;
    }
    if (m->nodes[node].hit < 0) {
        m->nodes[node].hit = (int64_t)stop_id;
        m->nodes[node].hit_len = len;
    }
}

/* Sets the fail links, level by level: a node's link is found from its parent's. The links of a level need only those
 * above, and `queue` (as long as the trie) holds the nodes in that order. */
static void link_failures(di_stop_matcher *m, size_t *queue) {
    size_t head = 0, tail = 0;
    queue[tail++] = 0;
    while (head < tail) {
        size_t parent = queue[head++];
        for (size_t node = m->nodes[parent].first_child; node != 0; node = m->nodes[node].sibling) {
            size_t fail = 0;
            if (parent != 0) {
                size_t from = m->nodes[parent].fail;
                while ((fail = child_of(m, from, m->nodes[node].byte)) == 0 && from != 0) {
                    from = m->nodes[from].fail;
                }
            }
            m->nodes[node].fail = fail;
            /* A shorter string may end here as well; of all that do, the one listed first counts. */
            if (m->nodes[fail].hit >= 0 && (m->nodes[node].hit < 0 || m->nodes[fail].hit < m->nodes[node].hit)) {
                m->nodes[node].hit = m->nodes[fail].hit;
                m->nodes[node].hit_len = m->nodes[fail].hit_len;
            }
            queue[tail++] = node;
        }
    }
}

di_status di_stop_matcher_init(di_stop_matcher *m, const char *const *stop, const size_t *stop_len, size_t n_stop,
                               di_error *err) {
    *m = (di_stop_matcher){0};
    size_t total = 0, node_bytes = 0, queue_bytes = 0;
    for (size_t i = 0; i < n_stop; i++) {
        if (!di_size_add(&total, total, stop_len[i])) {
            return di_fail(err, DI_ERR_RANGE, "stop strings: their total length overflows");
        }
    }
    if (total == 0) {
        return DI_OK;
    }
    size_t *queue = NULL;
    if (di_size_add(&node_bytes, total, 1) && di_size_mul(&queue_bytes, node_bytes, sizeof *queue) &&
        di_size_mul(&node_bytes, node_bytes, sizeof *m->nodes)) {
        m->nodes = malloc(node_bytes);
        m->bytes = malloc(total);
        queue = malloc(queue_bytes);
    }
    if (m->nodes == NULL || m->bytes == NULL || queue == NULL) {
        free(queue);
        di_stop_matcher_deinit(m);
        return di_fail(err, DI_ERR_MEMORY, "stop strings: no memory for %zu bytes of text", total);
    }
    m->nodes[0] = (di_stop_node){.hit = -1};
    m->n_nodes = 1;
    size_t at = 0;
    for (size_t i = 0; i < n_stop; i++) {
        if (stop_len[i] > 0) {
            memcpy(m->bytes + at, stop[i], stop_len[i]);
            insert(m, at, stop_len[i], i);
            at += stop_len[i];
        }
    }
    link_failures(m, queue);
    free(queue);
    return DI_OK;
}

void di_stop_matcher_deinit(di_stop_matcher *m) {
    free(m->nodes);
    free(m->bytes);
    *m = (di_stop_matcher){0};
}

void di_stop_matcher_reset(di_stop_matcher *m) {
    m->node = 0;
    m->found = 0;
}

size_t di_stop_matcher_step(di_stop_matcher *m, uint8_t byte) {
    if (m->n_nodes == 0) {
        return 0;
    }
    size_t child;
    while ((child = child_of(m, m->node, byte)) == 0 && m->node != 0) {
        m->node = m->nodes[m->node].fail;
    }
    m->node = child;
    if (m->nodes[child].hit < 0) {
        return 0;
    }
    m->found = (size_t)m->nodes[child].hit + 1;
    return m->nodes[child].hit_len;
}

size_t di_stop_matcher_held(const di_stop_matcher *m) {
    return m->n_nodes == 0 ? 0 : m->nodes[m->node].depth;
}

bool di_stop_matcher_push(di_stop_matcher *m, const char *text, size_t len, di_strbuf *out) {
    if (m->n_nodes == 0) {
        di_strbuf_append(out, text, len);
        return false;
    }
    for (size_t i = 0; i < len && m->found == 0; i++) {
        size_t node = m->node, held = m->nodes[node].depth;
        size_t hit_len = di_stop_matcher_step(m, (uint8_t)text[i]);
        /* held bytes and this one are on hand; the tail that stays is a match or the new path. */
        size_t stays = hit_len > 0 ? hit_len : m->nodes[m->node].depth;
        size_t n_out = held + 1 - stays;
        di_strbuf_append(out, m->bytes + m->nodes[node].path_at, DI_MIN(n_out, held));
        if (n_out > held) {
            di_strbuf_putc(out, text[i]);
        }
    }
    return m->found != 0;
}

void di_stop_matcher_finish(di_stop_matcher *m, di_strbuf *out) {
    if (m->n_nodes > 0 && m->found == 0) {
        di_strbuf_append(out, m->bytes + m->nodes[m->node].path_at, m->nodes[m->node].depth);
        m->node = 0;
    }
}

int64_t di_stop_matcher_hit(const di_stop_matcher *m) {
    return (int64_t)m->found - 1;
}
