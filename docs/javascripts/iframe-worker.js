// Pages opened as files may not start workers, which the search uses: run the script of one in a hidden frame instead.
"use strict";

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      this.queue = [];
      const inner = this.frame.contentWindow;
      inner.document.open();
      inner.document.write("<!doctype html><head></head>");
      inner.document.close();
      // To the script, `self.postMessage` answers the page, and messages arrive as events of its own window.
      inner.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      const script = inner.document.createElement("script");
          script.src = each;
          script.async = false;
          inner.document.head.append(script);
        }
      };
      const script = inner.document.createElement("script");
      script.src = url;
      script.onload = () => {
        const waiting = this.queue;
        this.queue = null;
        waiting.forEach((data) => this.deliver(data));
      };
      inner.document.head.append(script);
    }

    postMessage(data) {
      if (this.queue) this.queue.push(data);
      else this.deliver(data);
    }

    deliver(data) {
      const inner = this.frame.contentWindow;
      inner.dispatchEvent(new inner.MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
